"""Rewrites of rotary embeddings, which recognise a rotation in whatever way it is written."""
