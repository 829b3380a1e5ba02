"""dyt: checks and outputs."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ... import library
from .. import checks


@library.fake("dyt")
def dyt(call: Any) -> Tensor:
    check(call)
    return checks.like(call.x)


@library.fake("dyt_backward")
def dyt_backward(call: Any) -> tuple[Tensor | None, ...]:
    check(call)
    checks.same_form(call, "x", "dy")
    return checks.gradients(call, "x", "alpha", "gamma", "beta")


def check(call: Any) -> None:
    checks.row_parameters(call, "x", "gamma", "beta")
    checks.one_element(call, "x", "alpha")
