"""mhc_coeffs: checks and outputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ... import library
from .. import checks
from . import mhc

TENSORS = ("phi", "b", "alpha_pre", "alpha_post", "alpha_res")


@library.fake("mhc_coeffs_forward")
def mhc_coeffs_forward(call: Any) -> tuple[Tensor, ...]:
    _check(call)
    dtype = torch.float64 if call.x.dtype is torch.float64 else torch.float32
    return tuple(call.x.new_empty(shape, dtype=dtype) for shape in _shapes(call).values())


@library.fake("mhc_coeffs_backward")
def mhc_coeffs_backward(call: Any) -> tuple[Tensor | None, ...]:
    given = ("dh_pre", "dh_post", "dh_res", "product", "rstd")
    _check(call, *given)
    for name, (result, expected) in zip(given, _shapes(call).items(), strict=True):
        checks.shape(call, name, expected, f"the forward's {result}")
    return checks.gradients(call, "x", *TENSORS)


def _check(call: Any, *others: str) -> None:
    mhc.streams(call, *TENSORS, *others)
    hc, C = call.x.shape[-2:]
    columns = hc * hc + 2 * hc
    checks.shape(call, "phi", (hc * C, columns), "(hc * C, hc * hc + 2 * hc)")
    checks.shape(call, "b", (columns,), "phi's columns")
    for name in TENSORS[2:]:
        checks.shape(call, name, (), "a number")
    if call.tmax < 1:
        raise ValueError(f"{checks.op(call)}: tmax must be at least 1, got {call.tmax}")
    for name in ("rms_eps", "sinkhorn_eps"):
        value = getattr(call, name)
        if not value >= 0:
            raise ValueError(f"{checks.op(call)}: {name} must be at least 0, got {value}")


def _shapes(call: Any) -> dict[str, tuple[Any, ...]]:
    """The shapes of the forward's results."""
    *tokens, hc, _ = call.x.shape
    return {
        "h_pre": (*tokens, hc),
        "h_post": (*tokens, hc),
        "h_res": (*tokens, hc, hc),
        "product": (*tokens, hc * hc + 2 * hc),
        "rstd": tuple(tokens),
    }
