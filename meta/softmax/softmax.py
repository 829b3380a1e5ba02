"""softmax, log_softmax and sparsemax: checks and outputs."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ... import library
from .. import checks


@library.fake("softmax")
@library.fake("log_softmax")
@library.fake("sparsemax_forward")
def forward(call: Any) -> Tensor:
    checks.floating(call, "x")
    checks.at_least_dims(call, "x", 1, "(..., N)")
    return checks.like(call.x)


@library.fake("softmax_backward")
@library.fake("log_softmax_backward")
@library.fake("sparsemax_backward")
def backward(call: Any) -> Tensor:
    checks.floating(call, "y")
    checks.at_least_dims(call, "y", 1, "(..., N)")
    checks.same_form(call, "y", "dy")
    return checks.like(call.y)
