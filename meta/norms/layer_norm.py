"""layer_norm: checks and outputs."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ... import library
from .. import checks


@library.fake("layer_norm")
def layer_norm(call: Any) -> Tensor:
    checks.norm(call, "x", "weight", "bias")
    return checks.like(call.x)


@library.fake("layer_norm_backward")
def layer_norm_backward(call: Any) -> tuple[Tensor | None, ...]:
    checks.norm(call, "x", "weight", "bias")
    checks.same_form(call, "x", "dy")
    return checks.gradients(call, "x", "weight", "bias")
