"""Means and sums over the columns of a row, of which several devices may each have a part.

The definitions of norms and softmax take a row's statistics from here. `distributed` runs a
definition on a device's columns within `parts`, and the statistics are then those of the whole row.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from .precision import widened


class Parts(NamedTuple):
    """Rows that are sharded over columns: the columns of a whole row, and the sum and the maximum
    over the devices."""

    columns: int
    summed: Callable[[Tensor], Tensor]
    maximum: Callable[[Tensor], Tensor]


# A thread's own: autograd runs the backward of a CUDA device in another.
class _State(threading.local):
    parts: Parts | None = None


_state = _State()


@contextmanager
def parts(value: Parts) -> Iterator[None]:
    """Within, every x is a device's columns."""
    _state.parts = value
    try:
        yield
    finally:
        _state.parts = None


def columns(x: Tensor) -> int | torch.SymInt:
    """The number of columns of a whole row."""
    return x.shape[-1] if _state.parts is None else _state.parts.columns


def mean(x: Tensor) -> Tensor:
    """The mean over the last dimension, which is kept with size 1."""
    sharded = _state.parts
    if sharded is None:
        return x.mean(-1, keepdim=True)
    # A mean in half precision is accumulated in float32 and rounded once.
    total = sharded.summed(widened(x).sum(-1, keepdim=True))
    return (total / sharded.columns).to(x.dtype)


def total(x: Tensor) -> Tensor:
    """The sum over the last dimension, which is kept with size 1."""
    own = x.sum(-1, keepdim=True)
    return own if _state.parts is None else _state.parts.summed(own)


def softmax(x: Tensor) -> Tensor:
    if _state.parts is None:
        return torch.softmax(x, -1)
    weights = torch.exp(_centred(x, _state.parts))
    return weights / total(weights)


def log_softmax(x: Tensor) -> Tensor:
    if _state.parts is None:
        return torch.log_softmax(x, -1)
    x = _centred(x, _state.parts)
    return x - torch.log(total(torch.exp(x)))


def _centred(x: Tensor, sharded: Parts) -> Tensor:
    """x less its maximum."""
    # A device without columns has no maximum.
    empty = x.new_full((*x.shape[:-1], 1), float("-inf"))
    own = x.amax(-1, keepdim=True) if x.shape[-1] else empty
    return x - sharded.maximum(own)


def columns_sum(x: Tensor) -> Tensor:
    """The sum over all dimensions but the last."""
    # A reshape to (-1, N) is not defined for the 0 columns that a device may have.
    return x.flatten(0, -2).sum(0) if x.dim() > 1 else x
