"""Triton-Ascend kernels for Huawei's NPUs, tiled for the Unified Buffer of a vector core."""

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
