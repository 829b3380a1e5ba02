"""Forwards that make a torch.nn.CrossEntropyLoss in each call.

Dynamo has a trace of its own for that class, which takes only tensors. A copy of such a forward,
for torch.compile alone, sees another object under the global name CrossEntropyLoss, which calls
torch.nn.functional.cross_entropy.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from ..layers.rebinding import is_wrapped_plainly, rebound

NAME = "CrossEntropyLoss"


class TracedLoss:
    """Like torch.nn.CrossEntropyLoss."""

    def __init__(
        self, weight: Tensor | None = None, size_average: Any = None, ignore_index: int = -100,
        reduce: Any = None, reduction: str = "mean", label_smoothing: float = 0.0,
    ) -> None:  # fmt: skip
        self.arguments = (weight, size_average, ignore_index, reduce, reduction, label_smoothing)

    def __call__(self, logits: Any, target: Any) -> Tensor:
        return F.cross_entropy(logits, target, *self.arguments)


def with_traced_loss(forward: Any) -> Any:
    """A copy of a forward that makes TracedLoss for CrossEntropyLoss, or None if its code does not
    name that class."""
    inner = forward
    while NAME not in inner.__code__.co_names and hasattr(inner, "__wrapped__"):
        inner = inner.__wrapped__
    named = NAME in inner.__code__.co_names and inner.__globals__.get(NAME) is nn.CrossEntropyLoss
    if not named or not is_wrapped_plainly(forward):
        return None
    return rebound(forward, {NAME: lambda value: TracedLoss})
