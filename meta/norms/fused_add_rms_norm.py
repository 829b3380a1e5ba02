"""fused_add_rms_norm: checks and outputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ... import library
from ...ops.norms.rms_norm import CASTING_MODES
from .. import checks
from .rms_norm import check


@library.fake("fused_add_rms_norm")
def fused_add_rms_norm(call: Any) -> tuple[Tensor, Tensor]:
    check(call, "x")
    checks.choice(call, "casting_mode", CASTING_MODES)
    checks.same_form(call, "x", "residual")
    dtype = torch.promote_types(call.x.dtype, call.residual.dtype)
    return checks.like(call.x, dtype), checks.like(call.x, dtype)


@library.fake("fused_add_rms_norm_backward")
def fused_add_rms_norm_backward(call: Any) -> tuple[Tensor | None, ...]:
    check(call, "s")
    checks.same_form(call, "s", "dy", "ds")
    return checks.gradients(call, "s", "weight")
