"""Gated activations and the tiled MLP."""
