"""Modules that call the ops."""

from .activations import GEGLU, ClampedSwiGLU, ReLUSquared, SwiGLU
from .cross_entropy import CrossEntropyLoss, CrossEntropyOutput
from .divergence import Divergence
from .gated_rms_norm import GatedRMSNorm
from .group_norm import GroupNorm
from .layer_norm import LayerNorm
from .linear_cross_entropy import LinearCrossEntropyLoss
from .log_prob import LinearLogProb, LogProb
from .rms_norm import FusedAddRMSNorm, RMSNorm
from .rope import Rope
from .softmax import LogSoftmax, Softmax

__all__ = [
    "GEGLU",
    "ClampedSwiGLU",
    "CrossEntropyLoss",
    "CrossEntropyOutput",
    "Divergence",
    "FusedAddRMSNorm",
    "GatedRMSNorm",
    "GroupNorm",
    "LayerNorm",
    "LinearCrossEntropyLoss",
    "LinearLogProb",
    "LogProb",
    "LogSoftmax",
    "RMSNorm",
    "ReLUSquared",
    "Rope",
    "Softmax",
    "SwiGLU",
]
