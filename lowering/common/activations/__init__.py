"""What the kernels of every device share: gated activations."""
