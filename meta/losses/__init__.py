"""Checks and outputs: losses."""
