"""Softmax, log-softmax and sparsemax."""
