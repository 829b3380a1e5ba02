"""Statistics of rows whose columns are on one device, or sharded over several.

The definitions of norms and softmax compute a row's statistics by their keyword argument `rows`.
`distributed` passes `ShardedColumns`: the statistics are then those of whole rows, although each
device has some of the columns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .tensors import widened


class RowStatistics:
    """Statistics over the last dimension, of rows with all their columns on one device."""

    def mean(self, x: Tensor) -> Tensor:
        """Return the mean over the last dimension, which is kept with size 1."""
        return x.mean(-1, keepdim=True)

    def total(self, x: Tensor) -> Tensor:
        """Return the sum over the last dimension, which is kept with size 1."""
        return x.sum(-1, keepdim=True)

    def softmax(self, x: Tensor) -> Tensor:
        return torch.softmax(x, -1)

    def log_softmax(self, x: Tensor) -> Tensor:
        return torch.log_softmax(x, -1)


WHOLE = RowStatistics()


class ShardedColumns(RowStatistics):
    """Statistics of rows of which every device has some columns.

    `columns` is the number of columns of a whole row. `summed` and `maximum` compute the sum and
    the maximum of a tensor over the devices.
    """

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
        """Return x less the maximum of its whole row."""
        # A device without columns has no maximum, and amax would raise.
        empty = x.new_full((*x.shape[:-1], 1), float("-inf"))
        local = x.amax(-1, keepdim=True) if x.shape[-1] else empty
        return x - self.maximum(local)


class _Summed(torch.autograd.Function):
    """A sum over devices. Each device uses the sum, so its gradient is summed over them too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, summed: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.summed = summed
        return summed(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.summed(grad), None
