"""Checks and outputs: rotary embeddings."""
