"""Checks and outputs: norms."""
