"""Checks and outputs: softmax and sparsemax."""
