"""Triton kernels: norms."""
