"""Triton-Ascend kernels: losses."""
