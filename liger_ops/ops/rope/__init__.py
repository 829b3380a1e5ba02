"""Rotary embeddings, alone and after a norm."""
