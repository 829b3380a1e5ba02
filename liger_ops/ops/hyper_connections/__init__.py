"""Hyper-connections: coefficients, the layer's input, and the mixed streams."""
