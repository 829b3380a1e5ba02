"""Triton kernels: gated activations."""
