"""What the kernels of every device share: experts."""
