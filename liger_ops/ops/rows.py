"""Means and sums over the columns of a row, of which several devices may each have a part.

The definitions of norms and softmax take a row's statistics from their keyword argument `rows`.
`distributed` gives a definition `ShardedColumns`, and the statistics are then those of whole rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .precision import widened


class RowStatistics:
    """The statistics over the last dimension of rows that a device has whole."""

    def mean(self, x: Tensor) -> Tensor:
        """The mean over the last dimension, which is kept with size 1."""
        return x.mean(-1, keepdim=True)

    def total(self, x: Tensor) -> Tensor:
        """The sum over the last dimension, which is kept with size 1."""
        return x.sum(-1, keepdim=True)

    def softmax(self, x: Tensor) -> Tensor:
        return torch.softmax(x, -1)

    def log_softmax(self, x: Tensor) -> Tensor:
        return torch.log_softmax(x, -1)


WHOLE = RowStatistics()


class ShardedColumns(RowStatistics):
    """The statistics of rows of so many columns, of which x has a device's; `summed` and `maximum`
    are the sum and the maximum over the devices."""

    def __init__(
        self, columns: int, summed: Callable[[Tensor], Tensor], maximum: Callable[[Tensor], Tensor]
    ) -> None:
        self.columns, self.summed, self.maximum = columns, summed, maximum

    def mean(self, x: Tensor) -> Tensor:
        # A mean in half precision is accumulated in float32 and rounded once.
        return (self.total(widened(x)) / self.columns).to(x.dtype)

    def total(self, x: Tensor) -> Tensor:
        return _Summed.apply(x.sum(-1, keepdim=True), self.summed)

    def softmax(self, x: Tensor) -> Tensor:
        weights = torch.exp(self._centred(x))
        return weights / self.total(weights)

    def log_softmax(self, x: Tensor) -> Tensor:
        x = self._centred(x)
        return x - torch.log(self.total(torch.exp(x)))

    def _centred(self, x: Tensor) -> Tensor:
        """x less its maximum."""
        # A device without columns has no maximum.
        empty = x.new_full((*x.shape[:-1], 1), float("-inf"))
        own = x.amax(-1, keepdim=True) if x.shape[-1] else empty
        return x - self.maximum(own)


class _Summed(torch.autograd.Function):
    """A sum over devices that each use it, so that its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, summed: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.summed = summed
        return summed(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.summed(grad), None
