"""Triton-Ascend kernels: rotary embeddings."""
