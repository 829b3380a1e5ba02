"""Triton-Ascend kernels and grouped matrix products: mixtures of experts."""
