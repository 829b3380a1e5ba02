"""log_softmax, by softmax's kernels."""

from __future__ import annotations

from torch import Tensor

from ... import library, meta
from .launch import Plan
from .softmax import backward, forward


@library.kernel("log_softmax", "cuda")
def log_softmax(x: Tensor, *, plan: Plan | None = None) -> Tensor:
    y = meta.log_softmax.log_softmax(x)
    forward(x, y, True, plan)
    return y


@library.kernel("log_softmax_backward", "cuda")
def log_softmax_backward(dy: Tensor, y: Tensor, *, plan: Plan | None = None) -> Tensor:
    dx = meta.log_softmax.log_softmax_backward(dy, y)
    backward(dy, y, dx, True, plan)
    return dx
