"""Argument checks and output allocation: one file an op.

Each function is its op's fake implementation, and what a device's kernel calls to check its
arguments and allocate its outputs.
"""

from . import fused_add_rms_norm, group_norm, layer_norm, log_softmax, rms_norm, rope, softmax

__all__ = [
    "fused_add_rms_norm",
    "group_norm",
    "layer_norm",
    "log_softmax",
    "rms_norm",
    "rope",
    "softmax",
]
