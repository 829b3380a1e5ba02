"""linear_log_prob: checks and outputs."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ... import library
from .. import checks
from ..losses.log_prob import check_gradients, results
from .linear_cross_entropy import HEAD, check_linear


@library.fake("linear_log_prob_forward")
def linear_log_prob_forward(call: Any) -> tuple[Tensor | None, ...]:
    check_linear(call)
    checks.positive(call, "temperature", "softcap", "logit_scale")
    return results(call, call.x)


@library.fake("linear_log_prob_backward")
def linear_log_prob_backward(call: Any) -> tuple[Tensor | None, ...]:
    check_linear(call, "output_mask")
    checks.positive(call, "temperature", "softcap", "logit_scale")
    check_gradients(call, "x")
    return checks.gradients(call, *HEAD)
