"""Triton kernels: norms over groups of channels."""
