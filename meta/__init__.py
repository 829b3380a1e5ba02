"""Argument checks and output allocation: one file an op.

Each function is its op's fake implementation, and what a device's kernel calls to check its
arguments and allocate its outputs.
"""

from . import (
    clamped_swiglu,
    cross_entropy,
    fused_add_rms_norm,
    geglu,
    group_norm,
    layer_norm,
    linear_cross_entropy,
    log_softmax,
    relu_squared,
    rms_norm,
    rope,
    softmax,
    swiglu,
)

__all__ = [
    "clamped_swiglu",
    "cross_entropy",
    "fused_add_rms_norm",
    "geglu",
    "group_norm",
    "layer_norm",
    "linear_cross_entropy",
    "log_softmax",
    "relu_squared",
    "rms_norm",
    "rope",
    "softmax",
    "swiglu",
]
