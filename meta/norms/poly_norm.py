"""poly_norm: checks and outputs."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ... import library
from .. import checks


@library.fake("poly_norm")
def poly_norm(call: Any) -> Tensor:
    check(call)
    return checks.like(call.x)


@library.fake("poly_norm_backward")
def poly_norm_backward(call: Any) -> tuple[Tensor | None, ...]:
    check(call)
    checks.same_form(call, "x", "dy")
    return checks.gradients(call, "x", "weight", "bias")


def check(call: Any) -> None:
    checks.row_parameters(call, "x")
    checks.floating(call, "weight")
    checks.same_device(call, "x", "weight")
    checks.shape(call, "weight", (3,), "the three powers")
    checks.one_element(call, "x", "bias")
    checks.epsilon(call)
