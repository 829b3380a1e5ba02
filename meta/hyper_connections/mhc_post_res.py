"""mhc_post_res: checks and outputs."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ... import library
from .. import checks
from . import mhc


@library.fake("mhc_post_res")
def mhc_post_res(call: Any) -> Tensor:
    _check(call)
    return checks.like(call.x)


@library.fake("mhc_post_res_backward")
def mhc_post_res_backward(call: Any) -> tuple[Tensor | None, ...]:
    _check(call, "dy")
    checks.shape(call, "dy", call.x.shape, "x")
    return checks.gradients(call, "x", "f_out", "h_post", "h_res")


def _check(call: Any, *grads: str) -> None:
    mhc.streams(call, "f_out", "h_post", "h_res", *grads)
    *tokens, hc, C = call.x.shape
    checks.shape(call, "f_out", (*tokens, C), "x without its streams")
    checks.shape(call, "h_post", (*tokens, hc), "x without its channels")
    checks.shape(call, "h_res", (*tokens, hc, hc), "x's streams by its streams")
