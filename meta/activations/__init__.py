"""Checks and outputs: gated activations."""
