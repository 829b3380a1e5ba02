"""Norms, activations, rotary embeddings and hyper-connections of a model."""
