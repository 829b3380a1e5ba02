"""Rotations of queries and keys in a graph, with their inputs and their consumers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rewriting import values

# All different, because equal sizes become one symbol when shapes are dynamic.
B, HEADS, KV_HEADS, S, D = 2, 6, 3, 5, 16

Rotation = Callable[[Tensor, Tensor, Tensor], Tensor]


def rotate_half(x: Tensor) -> Tensor:
    x1, x2 = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


def rotate_neighbours(x: Tensor) -> Tensor:
    x1, x2 = x[..., ::2], x[..., 1::2]
    return torch.stack([-x2, x1], dim=-1).flatten(-2)


def llama(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return (x * cos) + (rotate_half(x) * sin)


def cohere(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return (x * cos) + (rotate_neighbours(x) * sin)


def phi3(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    rotated, passed = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    return torch.cat([llama(rotated, cos, sin), passed], dim=-1)


def heads(dtype: torch.dtype = torch.float32, rows: int = B, length: int = S) -> list[Tensor]:
    """Return queries and keys as a projection leaves them: (B, S, heads, D)."""
    q = values(rows, length, HEADS, D, dtype=dtype)
    return [q, values(rows, length, KV_HEADS, D, dtype=dtype, seed=1)]


def tables(
    columns: int, dtype: torch.dtype = torch.float32, rows: int = 1, length: int = S
) -> list[Tensor]:
    """Return cos and sin; if columns is D, both halves have the same angles, as in models."""
    distinct = max(columns // 2, 1) if columns in (D, D // 2) else columns
    angles = torch.linspace(0.1, 3.0, rows * length * distinct).view(rows, length, distinct)
    angles = angles.repeat(1, 1, columns // distinct)
    return [angles.cos().to(dtype), angles.sin().to(dtype)]


def used(rotated: Tensor) -> Tensor:
    """Consume a result in a way that accepts any strides."""
    return rotated.reshape(*rotated.shape[:2], -1).flip(1)


def applied(rotation: Rotation) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return a function that rotates q and k, with heads viewed as (B, heads, S, D)."""

    def function(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        q, k = q.transpose(1, 2), k.transpose(1, 2)
        return used(rotation(q, cos, sin)), used(rotation(k, cos, sin))

    return function
