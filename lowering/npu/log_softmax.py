"""log_softmax, by softmax's kernels."""

from __future__ import annotations

from torch import Tensor

from ... import library, meta
from .softmax import launch_softmax, launch_softmax_backward
from .tiling import Plan


@library.kernel("log_softmax", "npu")
def log_softmax(x: Tensor, *, plan: Plan | None = None) -> Tensor:
    y = meta.log_softmax.log_softmax(x)
    launch_softmax(x, y, True, plan)
    return y


@library.kernel("log_softmax_backward", "npu")
def log_softmax_backward(dy: Tensor, y: Tensor, *, plan: Plan | None = None) -> Tensor:
    dx = meta.log_softmax.log_softmax_backward(dy, y)
    launch_softmax_backward(dy, y, dx, True, plan)
    return dx
