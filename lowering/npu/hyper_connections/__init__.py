"""Triton-Ascend kernels: hyper-connections."""
