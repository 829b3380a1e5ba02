"""Triton kernels: rms_norm with a gate."""
