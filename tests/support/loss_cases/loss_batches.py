"""Random batches for the losses of `liger_ops.losses`, and parts of their formulas."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

SMOOTHING = 0.2


def sigma(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def smoothed(z: float) -> float:
    return -(1 - SMOOTHING) * math.log(sigma(z)) - SMOOTHING * math.log(sigma(-z))


def mean(x: list[float]) -> float:
    return sum(x) / max(len(x), 1)


class LossBatch(NamedTuple):
    """A mask of tokens, and random float64 values, which are NaN where the mask is False."""

    mask: Tensor
    seed: int

    def values(self, number: int, scale: float = 1.0) -> Tensor:
        """Draw log-probabilities, which are negative; each `number` selects another seed."""
        generator = torch.Generator().manual_seed(1000 * self.seed + number)
        values = -torch.rand(self.mask.shape, generator=generator, dtype=torch.float64) * scale
        return values.masked_fill(~self.mask, torch.nan)

    def per_row(self, number: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * self.seed + 500 + number)
        return torch.randn(self.mask.shape[0], generator=generator, dtype=torch.float64)

    def kept(self, values: Tensor) -> list[list[float]]:
        """Return the values that the mask keeps, as lists of numbers."""
        return [row[m].tolist() for row, m in zip(values, self.mask, strict=True)]


@st.composite
def loss_batches(draw: Any, *, pairs: bool = False) -> LossBatch:
    """Draw rows of odd and even lengths; any of them may be masked whole."""
    rows = draw(st.integers(1, 4)) * (2 if pairs else 1)
    tokens = draw(st.sampled_from([1, 2, 3, 7]))
    seed = draw(st.integers(0, 100))
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(rows, tokens, generator=generator) < draw(st.sampled_from([0.4, 0.9, 1.0]))
    empty = draw(st.sets(st.integers(0, rows - 1)))
    mask[sorted(empty)] = False
    return LossBatch(mask, seed)


def full_batch(rows: int, tokens: int, seed: int = 0) -> LossBatch:
    """Return a batch in which every second row ends early, and none is masked whole."""
    mask = torch.ones(rows, tokens, dtype=torch.bool)
    mask[::2, tokens // 2 + 1 :] = False
    return LossBatch(mask, seed)
