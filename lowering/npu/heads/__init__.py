"""Triton-Ascend kernels: losses of hidden states and a head."""
