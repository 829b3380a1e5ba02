"""relu_squared: checks and outputs."""

from __future__ import annotations

from torch import Tensor

from .. import library
from . import checks


@library.fake("relu_squared")
def relu_squared(x: Tensor) -> Tensor:
    checks.floating("relu_squared", x=x)
    return checks.like(x)


@library.fake("relu_squared_backward")
def relu_squared_backward(dy: Tensor, x: Tensor) -> Tensor:
    checks.floating("relu_squared_backward", x=x)
    checks.same_form("relu_squared_backward", x, "x", dy=dy)
    return checks.like(x)
