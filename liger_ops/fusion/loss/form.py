"""The scale, soft cap, bias and cast of logits between the head and the loss."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...accepted import is_scale


@dataclass(frozen=True)
class LogitsTransform:
    """The transform post * tanh(pre * (logits + bias)) of logits, with the tanh only if `capped`.

    pre is multiplier / divisor. The two are kept apart so that a cap of 30 gives the scale 30 / 30.
    dtype is that of a cast or a sum, or None for the dtype of the head's output.

    It is not a NamedTuple, because Dynamo of torch 2.11 makes an empty one after a graph break.
    """

    multiplier: float = 1.0
    divisor: float = 1.0
    capped: bool = False
    post: float = 1.0
    bias: Tensor | None = None
    dtype: torch.dtype | None = None

    @property
    def softcap(self) -> float | None:
        return self.post if self.capped else None

    @property
    def logit_scale(self) -> float:
        return self.multiplier * self.post / self.divisor

    @property
    def is_untouched(self) -> bool:
        """Return whether the logits are those of the head, unchanged."""
        numbers = self.multiplier == self.divisor == 1.0 and not self.capped
        return numbers and self.bias is None and self.dtype is None

    def times(self, factor: float, divisor: float = 1.0) -> LogitsTransform:
        if self.capped:
            return replace(self, post=self.post * factor / divisor)
        return replace(self, multiplier=self.multiplier * factor, divisor=self.divisor * divisor)

    def plus(self, bias: Tensor, dtype: torch.dtype) -> LogitsTransform:
        return replace(self, bias=bias.reshape(-1), dtype=torch.promote_types(dtype, bias.dtype))


def is_factor(value: Any) -> bool:
    """Return whether a value is a number by which the op can scale logits."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and is_scale(value)


def keeps_columns(index: Any, dims: int, columns: int) -> bool:
    """Return whether an index of a tensor of `dims` dimensions selects rows, with all columns."""
    items = list(index) if isinstance(index, tuple) else [index]
    used = sum(_dims_of(item) for item in items)
    if not any(item is Ellipsis for item in items):
        return used < dims or used == dims and _is_whole(items[-1], columns)
    return used < dims and (items[-1] is Ellipsis or _is_whole(items[-1], columns))


def _dims_of(item: Any) -> int:
    if item is None or item is Ellipsis:
        return 0
    if isinstance(item, Tensor) and item.dtype is torch.bool:
        return item.dim()
    return 1


def _is_whole(item: Any, size: int) -> bool:
    if not isinstance(item, slice) or item.start not in (None, 0) or item.step not in (None, 1):
        return False
    return item.stop is None or item.stop >= size
