"""Checks and outputs: losses of hidden states and a head."""
