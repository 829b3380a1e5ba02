"""The gated activations: checks and outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ... import library
from ...ops.activations.geglu import APPROXIMATIONS
from .. import checks


def register(name: str, check_options: Callable[[Any], None] = lambda call: None) -> None:
    @library.fake(name)
    def forward(call: Any) -> Tensor:
        check_options(call)
        shape = _shape(call)
        if call.up is not None:
            return checks.like(call.gate, torch.promote_types(call.gate.dtype, call.up.dtype))
        return call.gate.new_empty(shape, requires_grad=False)

    @library.fake(f"{name}_backward")
    def backward(call: Any) -> tuple[Tensor | None, ...]:
        check_options(call)
        shape = _shape(call)
        checks.floating(call, "dy")
        checks.same_device(call, "gate", "dy")
        checks.shape(call, "dy", shape, "the result")
        return checks.gradients(call, "gate", "up")


def _shape(call: Any) -> tuple[int, ...]:
    """Check gate and up, or a packed gate, and return the shape of the result."""
    gate = call.gate
    checks.floating(call, "gate", "up")
    if call.up is not None:
        checks.same_form(call, "gate", "up")
        return gate.shape
    if gate.dim() == 0 or gate.shape[-1] % 2 != 0:
        raise ValueError(
            f"{checks.op(call)}: gate must be (..., 2N) without up, which it then holds,"
            f" got shape {tuple(gate.shape)}"
        )
    return (*gate.shape[:-1], gate.shape[-1] // 2)


def _check_clamped(call: Any) -> None:
    op = checks.op(call)
    if not call.limit >= 0:
        raise ValueError(f"{op}: limit must be a number of at least 0, got {call.limit}")
    if call.interleaved and call.up is not None:
        raise ValueError(f"{op}: interleaved must be False with an up beside gate, got True")


register("swiglu")
register("clamped_swiglu", _check_clamped)
register("geglu", lambda call: checks.choice(call, "approximate", APPROXIMATIONS))
