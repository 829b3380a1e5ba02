"""Masks that are known when a graph is called: padding, and masks that cross a graph break."""
