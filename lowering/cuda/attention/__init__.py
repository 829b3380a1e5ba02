"""Triton kernels: attention."""
