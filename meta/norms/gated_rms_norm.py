"""gated_rms_norm: checks and outputs."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ... import library
from ...ops.norms.gated_rms_norm import ACTIVATIONS, CASTING_MODES
from .. import checks


@library.fake("gated_rms_norm")
def gated_rms_norm(call: Any) -> Tensor:
    _check(call)
    checks.choice(call, "casting_mode", CASTING_MODES)
    return checks.like(call.x)


@library.fake("gated_rms_norm_backward")
def gated_rms_norm_backward(call: Any) -> tuple[Tensor | None, ...]:
    _check(call)
    checks.same_form(call, "x", "dy")
    return checks.gradients(call, "x", "gate", "weight")


def _check(call: Any) -> None:
    checks.norm(call, "x")
    checks.same_form(call, "x", "gate")
    checks.choice(call, "activation", ACTIVATIONS)
    N, group_size = call.x.shape[-1], call.group_size
    if group_size is not None and (group_size < 1 or N % group_size != 0):
        raise ValueError(
            f"{checks.op(call)}: group_size must be a divisor of x's {N} columns, got {group_size}"
        )
