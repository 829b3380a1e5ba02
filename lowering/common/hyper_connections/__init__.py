"""Host code and arithmetic for the kernels of every device: hyper-connections."""
