"""Host code and Triton functions that the kernels of every device share."""
