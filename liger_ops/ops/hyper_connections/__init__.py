"""Hyper-connections: their coefficients, a layer's input, and the streams after a layer."""
