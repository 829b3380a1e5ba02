"""Modulation of a norm's result, as in AdaLN: y * (1 + scale) + shift."""

from __future__ import annotations

import math

from torch import Tensor


def samples_of(scale: Tensor) -> int:
    """Return the number of scale's rows: one for each sample, in the order of x's rows."""
    return math.prod(scale.shape[:-1])


def by_sample(x: Tensor, scale: Tensor) -> Tensor:
    """Reshape x to (samples, tokens of a sample, N)."""
    samples = samples_of(scale)
    tokens = math.prod(x.shape[:-1]) // samples if samples else 0
    return x.reshape(samples, tokens, x.shape[-1])


def _rows(scale: Tensor) -> Tensor:
    """Reshape scale or shift to (samples, 1, N)."""
    return scale.reshape(samples_of(scale), 1, scale.shape[-1])


def modulated(y: Tensor, scale: Tensor, shift: Tensor | None, casting_mode: str) -> Tensor:
    """Return y * (1 + scale) + shift, each operation in the dtype of PyTorch's type promotion.

    In the casting mode "float32", scale and shift are first cast to y's dtype.
    """
    if casting_mode == "float32":
        scale, shift = scale.to(y.dtype), None if shift is None else shift.to(y.dtype)
    rows = by_sample(y, scale) * (1 + _rows(scale))
    if shift is not None:
        rows = rows + _rows(shift)
    return rows.reshape(y.shape)
