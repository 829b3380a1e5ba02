"""Triton-Ascend kernels: softmax and sparsemax."""
