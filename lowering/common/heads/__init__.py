"""What the kernels of every device share: losses of hidden states and a head."""
