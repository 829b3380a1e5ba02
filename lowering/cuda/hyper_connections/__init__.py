"""Triton kernels: hyper-connections."""
