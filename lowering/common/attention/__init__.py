"""What the kernels of every device share: attention."""
