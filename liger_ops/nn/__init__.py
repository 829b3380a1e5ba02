"""Modules that call the ops."""

from .activations import GEGLU, ClampedSwiGLU, ReLUSquared, SwiGLU
from .cross_entropy import CrossEntropyLoss, CrossEntropyOutput
from .distribution_losses import JSD, TVD, KLDiv
from .divergence import Divergence
from .gated_rms_norm import GatedRMSNorm
from .group_norm import GroupNorm
from .layer_norm import LayerNorm
from .linear_cross_entropy import LinearCrossEntropyLoss
from .linear_divergence import LinearDivergence
from .log_prob import LinearLogProb, LogProb
from .neighborhood_attention import NeighborhoodAttention
from .rms_norm import FusedAddRMSNorm, RMSNorm
from .rope import Rope
from .softmax import LogSoftmax, Softmax

__all__ = [
    "GEGLU",
    "JSD",
    "TVD",
    "ClampedSwiGLU",
    "CrossEntropyLoss",
    "CrossEntropyOutput",
    "Divergence",
    "FusedAddRMSNorm",
    "GatedRMSNorm",
    "GroupNorm",
    "KLDiv",
    "LayerNorm",
    "LinearCrossEntropyLoss",
    "LinearDivergence",
    "LinearLogProb",
    "LogProb",
    "LogSoftmax",
    "NeighborhoodAttention",
    "RMSNorm",
    "ReLUSquared",
    "Rope",
    "Softmax",
    "SwiGLU",
]
