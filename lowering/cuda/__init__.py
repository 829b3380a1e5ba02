"""Triton kernels for GPUs, NVIDIA's and AMD's: PyTorch's device type is "cuda" on both."""

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
