"""What the kernels of every device share: hyper-connections."""
