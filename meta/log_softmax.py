"""log_softmax: checks and outputs, which are softmax's."""

from __future__ import annotations

from torch import Tensor

from .. import library
from .softmax import backward, forward


@library.fake("log_softmax")
def log_softmax(x: Tensor) -> Tensor:
    return forward("log_softmax", x)


@library.fake("log_softmax_backward")
def log_softmax_backward(dy: Tensor, y: Tensor) -> Tensor:
    return backward("log_softmax_backward", dy, y)
