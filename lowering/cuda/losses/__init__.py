"""Triton kernels: losses."""
