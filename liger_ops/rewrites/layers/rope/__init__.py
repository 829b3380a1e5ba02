"""Rewrites of rotary embeddings, which read the ways to write a rotation."""
