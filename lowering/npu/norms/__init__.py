"""Triton-Ascend kernels: norms."""
