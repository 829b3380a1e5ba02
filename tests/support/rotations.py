"""Rotations of queries and keys in a graph: their sizes, and what feeds and consumes them."""

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


def heads(dtype: torch.dtype = torch.float32, rows: int = B, length: int = S) -> list[Tensor]:
    """Queries and keys, as a projection leaves them: (B, S, heads, D)."""
    q = values(rows, length, HEADS, D, dtype=dtype)
    return [q, values(rows, length, KV_HEADS, D, dtype=dtype, seed=1)]


def used(rotated: Tensor) -> Tensor:
    """A consumer that accepts any strides."""
    return rotated.reshape(*rotated.shape[:2], -1).flip(1)


def applied(rotation: Rotation) -> Callable[..., tuple[Tensor, Tensor]]:
    """The rotation of both, with heads viewed as (B, heads, S, D)."""

    def function(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        q, k = q.transpose(1, 2), k.transpose(1, 2)
        return used(rotation(q, cos, sin)), used(rotation(k, cos, sin))

    return function
