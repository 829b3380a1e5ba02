"""softmax: checks and outputs."""

from __future__ import annotations

from torch import Tensor

from .. import library
from . import checks


@library.fake("softmax")
def softmax(x: Tensor) -> Tensor:
    return forward("softmax", x)


@library.fake("softmax_backward")
def softmax_backward(dy: Tensor, y: Tensor) -> Tensor:
    return backward("softmax_backward", dy, y)


def forward(op: str, x: Tensor) -> Tensor:
    checks.floating(op, x=x)
    checks.at_least_dims(op, x, 1, "(..., N)")
    return checks.like(x)


def backward(op: str, dy: Tensor, y: Tensor) -> Tensor:
    checks.floating(op, y=y)
    checks.at_least_dims(op, y, 1, "(..., N)", "y")
    checks.same_form(op, y, "y", dy=dy)
    return checks.like(y)
