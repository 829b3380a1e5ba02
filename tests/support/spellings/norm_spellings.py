"""Norms as models spell them, for tests of the passes."""

from __future__ import annotations

import torch
from torch import Tensor

EPS = 1e-5


def inverse_rms(x: Tensor) -> Tensor:
    return torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)


def llama(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.to(torch.float32)
    variance = wide.pow(2).mean(-1, keepdim=True)
    wide = wide * torch.rsqrt(variance + EPS)
    return weight * wide.to(x.dtype)


def gemma(x: Tensor, weight: Tensor) -> Tensor:
    output = x.float() * inverse_rms(x.float())
    output = output * (1.0 + weight.float())
    return output.type_as(x)


def olmo2(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.to(torch.float32)
    return (weight * (wide * inverse_rms(wide))).to(x.dtype)


def unwidened(x: Tensor, weight: Tensor) -> Tensor:
    return x * inverse_rms(x) * weight
