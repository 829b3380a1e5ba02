"""Attention: masks and functions that transformers' models call by name."""
