"""Rewrites of losses, with the head that computes their logits."""
