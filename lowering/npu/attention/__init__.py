"""Triton-Ascend kernels: attention."""
