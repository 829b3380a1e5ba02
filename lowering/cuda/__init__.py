"""Triton kernels for GPUs. PyTorch's device type is "cuda" for AMD's too, for which they have been
compiled, but never run."""

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
