"""Triton kernels: rotary embeddings."""
