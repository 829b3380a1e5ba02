"""Modules that call the ops."""

from .activations import GEGLU, ClampedSwiGLU, ReLUSquared, SwiGLU
from .attn_res import AttnRes
from .cross_entropy import CrossEntropyLoss, CrossEntropyOutput
from .distribution_losses import JSD, TVD, KLDiv
from .divergence import Divergence
from .dyt import DyT
from .embedding import Embedding
from .gated_rms_norm import GatedRMSNorm
from .group_norm import GroupNorm
from .layer_norm import LayerNorm
from .linear_cross_entropy import LinearCrossEntropyLoss
from .linear_divergence import LinearDivergence
from .linear_top_k_divergence import LinearTopKDivergence
from .log_prob import LinearLogProb, LogProb
from .mhc import MHC, MHCCoeffs, MHCPostRes, MHCPre
from .modulated_norms import ModulatedLayerNorm, ModulatedRMSNorm
from .multi_token_attention import MultiTokenAttention
from .neighborhood_attention import NeighborhoodAttention
from .poly_norm import PolyNorm
from .rms_norm import FusedAddRMSNorm, RMSNorm
from .rms_norm_rope import RMSNormRope
from .rope import Rope
from .softmax import LogSoftmax, Softmax, Sparsemax
from .tiled_mlp import Tiled, TiledMLP

__all__ = [
    "GEGLU",
    "JSD",
    "MHC",
    "TVD",
    "AttnRes",
    "ClampedSwiGLU",
    "CrossEntropyLoss",
    "CrossEntropyOutput",
    "Divergence",
    "DyT",
    "Embedding",
    "FusedAddRMSNorm",
    "GatedRMSNorm",
    "GroupNorm",
    "KLDiv",
    "LayerNorm",
    "LinearCrossEntropyLoss",
    "LinearDivergence",
    "LinearLogProb",
    "LinearTopKDivergence",
    "LogProb",
    "LogSoftmax",
    "MHCCoeffs",
    "MHCPostRes",
    "MHCPre",
    "ModulatedLayerNorm",
    "ModulatedRMSNorm",
    "MultiTokenAttention",
    "NeighborhoodAttention",
    "PolyNorm",
    "RMSNorm",
    "RMSNormRope",
    "ReLUSquared",
    "Rope",
    "Softmax",
    "Sparsemax",
    "SwiGLU",
    "Tiled",
    "TiledMLP",
]
