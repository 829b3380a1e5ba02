"""rms_norm: checks and outputs."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ... import library
from ...ops.norms.rms_norm import CASTING_MODES
from .. import checks


@library.fake("rms_norm")
def rms_norm(call: Any) -> Tensor:
    check(call, "x")
    checks.choice(call, "casting_mode", CASTING_MODES)
    return checks.like(call.x)


@library.fake("rms_norm_backward")
def rms_norm_backward(call: Any) -> tuple[Tensor | None, ...]:
    check(call, "x")
    checks.same_form(call, "x", "dy")
    return checks.gradients(call, "x", "weight")


def check(call: Any, x: str) -> None:
    """Check the argument named `x`, weight, eps and offset."""
    checks.norm(call, x)
    if call.weight is None and call.offset != 0:
        raise ValueError(
            f"{checks.op(call)}: offset must be 0 without a weight to add it to, got {call.offset}"
        )
