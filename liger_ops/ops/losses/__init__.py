"""Losses of logits and of distributions."""
