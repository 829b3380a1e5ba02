"""Triton-Ascend kernels: gated activations."""
