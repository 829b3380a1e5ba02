"""group_norm: checks and outputs."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ... import library
from .. import checks


@library.fake("group_norm")
def group_norm(call: Any) -> Tensor:
    _check(call)
    return checks.like(call.x)


@library.fake("group_norm_backward")
def group_norm_backward(call: Any) -> tuple[Tensor | None, ...]:
    _check(call)
    checks.same_form(call, "x", "dy")
    return checks.gradients(call, "x", "weight", "bias")


def _check(call: Any) -> None:
    x, num_groups = call.x, call.num_groups
    checks.floating(call, "x", "weight", "bias")
    checks.at_least_dims(call, "x", 2, "(N, C, *spatial)")
    checks.same_device(call, "x", "weight", "bias")
    if num_groups < 1 or x.shape[1] % num_groups != 0:
        raise ValueError(
            f"{checks.op(call)}: num_groups must be a divisor of x's {x.shape[1]} channels,"
            f" got {num_groups}"
        )
    for name in ("weight", "bias"):
        checks.shape(call, name, x.shape[1:2], "x's channels")
    checks.epsilon(call)
