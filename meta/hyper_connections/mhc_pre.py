"""mhc_pre: checks and outputs."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ... import library
from .. import checks
from . import mhc


@library.fake("mhc_pre")
def mhc_pre(call: Any) -> Tensor:
    _check(call)
    return call.x.new_empty((*call.x.shape[:-2], call.x.shape[-1]))


@library.fake("mhc_pre_backward")
def mhc_pre_backward(call: Any) -> tuple[Tensor | None, ...]:
    _check(call, "dy")
    expected = (*call.x.shape[:-2], call.x.shape[-1])
    checks.shape(call, "dy", expected, "x without its streams")
    return checks.gradients(call, "x", "h_pre")


def _check(call: Any, *grads: str) -> None:
    mhc.streams(call, "h_pre", *grads)
    checks.shape(call, "h_pre", call.x.shape[:-1], "x without its channels")
