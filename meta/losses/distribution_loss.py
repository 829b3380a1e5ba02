"""kl_div, jsd and tvd: checks and outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ... import library
from ...ops.losses.distribution_loss import REDUCTIONS
from .. import checks
from .cross_entropy import check_target


def register(name: str, x: str, y: str, check_options: Callable[[Any], None]) -> None:
    """Register the fakes of a loss of the tensors that are called x and y."""

    @library.fake(name)
    def forward(call: Any) -> Tensor:
        check(call)
        return getattr(call, x).new_empty(shape(call), dtype=dtype(call), requires_grad=False)

    @library.fake(f"{name}_backward")
    def backward(call: Any) -> tuple[Tensor | None, ...]:
        check(call)
        checks.floating(call, "dloss")
        checks.same_device(call, x, "dloss")
        checks.shape(call, "dloss", shape(call), "the loss")
        return checks.gradients(call, x, y)

    def check(call: Any) -> None:
        checks.floating(call, x)
        checks.at_least_dims(call, x, 1, "(..., V)")
        checks.same_form(call, x, y)
        if getattr(call, "shift_labels", None) is not None:
            check_target(call, x, "shift_labels")
        check_options(call)

    def shape(call: Any) -> tuple[int, ...]:
        return getattr(call, x).shape if getattr(call, "reduction", "") == "none" else ()

    def dtype(call: Any) -> torch.dtype:
        double = torch.float64 in (getattr(call, x).dtype, getattr(call, y).dtype)
        return torch.float64 if double else torch.float32


def _check_kl_div(call: Any) -> None:
    checks.choice(call, "reduction", REDUCTIONS)
    checks.epsilon(call)


register("kl_div", "input", "target", _check_kl_div)
register("jsd", "input", "target", checks.beta)
register("tvd", "p", "q", lambda call: checks.choice(call, "reduction", REDUCTIONS))
