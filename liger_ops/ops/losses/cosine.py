"""The divergence of the kind "cosine" and its gradient, from rows of scaled logits."""

from __future__ import annotations

import torch
from torch import Tensor


def norm_of(x: Tensor) -> Tensor:
    """Return the norm of each row.

    It is inf for a row of zeros, whose cosine and gradient are then 0, and NaN for a row whose sum
    of squares is not finite.
    """
    squares = x.square().sum(-1)
    empty = squares == 0
    # squares - squares is 0 or, for an infinite sum, NaN.
    norm = torch.where(empty, 1.0, squares).sqrt() + (squares - squares)
    return torch.where(empty, float("inf"), norm)


def cosines(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the divergence, the cosine and both norms of each pair of rows."""
    norms = norm_of(x), norm_of(y)
    cosine = (x * y).sum(-1) / norms[0] / norms[1]
    return 1 - cosine, cosine, *norms


def slopes(x: Tensor, y: Tensor, cosine: Tensor, *norms: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of the divergence for x and y, from the cosine and both norms."""
    a, b = (row / norm.unsqueeze(-1) for row, norm in zip((x, y), norms, strict=True))
    cosine = cosine.unsqueeze(-1)
    return (cosine * a - b) / norms[0].unsqueeze(-1), (cosine * b - a) / norms[1].unsqueeze(-1)
