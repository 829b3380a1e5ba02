"""attn_res: checks and outputs."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ... import library
from .. import checks


@library.fake("attn_res")
def attn_res(call: Any) -> Tensor:
    _check(call)
    return call.x.new_empty(call.x.shape[1:], requires_grad=False)


@library.fake("attn_res_backward")
def attn_res_backward(call: Any) -> tuple[Tensor | None, ...]:
    _check(call)
    checks.floating(call, "dy")
    checks.same_device(call, "x", "dy")
    checks.shape(call, "dy", call.x.shape[1:], "a block of x")
    return checks.gradients(call, "x", "query", "weight")


def _check(call: Any) -> None:
    checks.floating(call, "x")
    checks.at_least_dims(call, "x", 2, "(N, ..., D)")
    if call.x.shape[0] == 0:
        raise ValueError(
            f"{checks.op(call)}: x must have at least one block, got shape {tuple(call.x.shape)}"
        )
    checks.norm(call, "x", "query", "weight")
