"""rms_norm_rope: checks and outputs."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ... import library
from ...ops.norms.rms_norm import CASTING_MODES
from .. import checks
from . import rope


@library.fake("rms_norm_rope")
def rms_norm_rope(call: Any) -> tuple[Tensor, Tensor]:
    _check(call)
    checks.choice(call, "casting_mode", CASTING_MODES)
    return checks.in_layout_of(call.q), checks.in_layout_of(call.k)


@library.fake("rms_norm_rope_backward")
def rms_norm_rope_backward(call: Any) -> tuple[Tensor | None, ...]:
    _check(call)
    checks.same_form(call, "q", "dq")
    checks.same_form(call, "k", "dk")
    names = ("q", "k", "q_weight", "k_weight")
    return checks.gradients(call, *names, allocate=checks.in_layout_of)


def _check(call: Any) -> None:
    rope.check(call, "q", "k")
    checks.floating(call, "q_weight", "k_weight")
    checks.same_device(call, "q", "q_weight", "k_weight")
    for name in ("q_weight", "k_weight"):
        checks.shape(call, name, call.q.shape[-1:], "q's last dimension")
        if getattr(call, name) is None and call.offset != 0:
            raise ValueError(
                f"{checks.op(call)}: offset must be 0 without {name}, to which it is added, got"
                f" {call.offset}"
            )
    checks.epsilon(call)
