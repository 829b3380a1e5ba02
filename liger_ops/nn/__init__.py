"""Modules that call the ops."""

from .activations import GEGLU, ClampedSwiGLU, ReLUSquared, SwiGLU
from .attention import AttnRes, MultiTokenAttention, NeighborhoodAttention
from .cross_entropy import CrossEntropyLoss, CrossEntropyOutput, LinearCrossEntropyLoss
from .embedding import Embedding
from .experts import MoEExperts
from .heads import LinearDivergence, LinearLogProb, LinearTopKDivergence
from .hyper_connections import MHC, MHCCoeffs, MHCPostRes, MHCPre
from .layer_norms import GroupNorm, LayerNorm, ModulatedLayerNorm
from .linear import LoRALinear, Tiled, TiledMLP
from .losses import JSD, TVD, Divergence, KLDiv, LogProb, RouterLosses
from .norm_variants import DyT, PolyNorm
from .norms import FusedAddRMSNorm, GatedRMSNorm, ModulatedRMSNorm, RMSNorm
from .rope import RMSNormRope, Rope
from .softmax import LogSoftmax, Softmax, Sparsemax

__all__ = [
    "GEGLU", "JSD", "MHC", "TVD", "AttnRes", "ClampedSwiGLU", "CrossEntropyLoss",
    "CrossEntropyOutput", "Divergence", "DyT", "Embedding", "FusedAddRMSNorm", "GatedRMSNorm",
    "GroupNorm", "KLDiv", "LayerNorm", "LinearCrossEntropyLoss", "LinearDivergence",
    "LinearLogProb", "LinearTopKDivergence", "LoRALinear", "LogProb", "LogSoftmax", "MHCCoeffs",
    "MHCPostRes", "MHCPre", "MoEExperts", "ModulatedLayerNorm", "ModulatedRMSNorm",
    "MultiTokenAttention", "NeighborhoodAttention", "PolyNorm", "RMSNorm", "RMSNormRope",
    "ReLUSquared", "Rope", "RouterLosses", "Softmax", "Sparsemax", "SwiGLU", "Tiled", "TiledMLP",
]  # fmt: skip
