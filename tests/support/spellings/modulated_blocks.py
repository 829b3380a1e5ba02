"""The modulated norms of diffusion transformers, as their blocks write them.

Each docstring names the code that the function or class computes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def dit(norm: nn.LayerNorm, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Compute `modulate` of facebookresearch/DiT, models.py."""
    return norm(x) * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


def zero(norm: nn.LayerNorm, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Compute diffusers' `AdaLayerNormZero.forward`, models/normalization.py: SD3, Flux, PixArt."""
    return norm(x) * (1 + scale[:, None]) + shift[:, None]


def continuous(norm: nn.LayerNorm, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Compute diffusers' `AdaLayerNormContinuous.forward`, normalization.py: the last norm."""
    return norm(x) * (1 + scale)[:, None, :] + shift[:, None, :]


class FP32LayerNorm(nn.LayerNorm):
    """`FP32LayerNorm` of diffusers, models/normalization.py."""

    def forward(self, x: Tensor) -> Tensor:
        weight = None if self.weight is None else self.weight.float()
        bias = None if self.bias is None else self.bias.float()
        y = F.layer_norm(x.float(), self.normalized_shape, weight, bias, self.eps)
        return y.to(x.dtype)


def wan(norm: nn.LayerNorm, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Compute `WanTransformerBlock.forward` of diffusers, models/transformers/transformer_wan.py.

    x is bfloat16; scale and shift are float32 of (B, 1, N), or (B, T, N) in Wan 2.2.
    """
    return (norm(x.float()) * (1 + scale) + shift).type_as(x)


class RMSNorm(nn.Module):
    """`RMSNorm` of diffusers, models/normalization.py, without a bias."""

    def __init__(self, dim: int, eps: float, elementwise_affine: bool = True) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim)) if elementwise_affine else None

    def forward(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        variance = x.to(torch.float32).pow(2).mean(-1, keepdim=True)
        x = x * torch.rsqrt(variance + self.eps)
        if self.weight is None:
            return x.to(dtype)
        if self.weight.dtype in (torch.float16, torch.bfloat16):
            x = x.to(self.weight.dtype)
        return x * self.weight
