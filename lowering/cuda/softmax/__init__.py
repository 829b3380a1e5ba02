"""Triton kernels: softmax and sparsemax."""
