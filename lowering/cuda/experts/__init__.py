"""Triton kernels: experts."""
