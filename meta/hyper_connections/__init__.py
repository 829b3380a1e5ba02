"""Checks and outputs: hyper-connections."""
