"""Losses of hidden states and a head, computed in chunks without all logits."""
