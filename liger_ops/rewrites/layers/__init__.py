"""Rewrites of norms, activations, rotary embeddings and hyper-connections."""
