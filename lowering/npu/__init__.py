"""Triton-Ascend kernels for Huawei's NPUs, tiled for the Unified Buffer of a vector core."""

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
