"""Host code and arithmetic for the kernels of every device: losses of hidden states and a head."""
