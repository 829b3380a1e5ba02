"""Norms: the definitions and gradients of the ops."""
