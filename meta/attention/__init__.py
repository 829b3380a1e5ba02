"""Checks and outputs: attention."""
