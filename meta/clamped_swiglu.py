"""clamped_swiglu: checks and outputs."""

from __future__ import annotations

from torch import Tensor

from .. import library
from . import gated


@library.fake("clamped_swiglu")
def clamped_swiglu(
    gate: Tensor,
    up: Tensor | None = None,
    alpha: float = 1.702,
    limit: float = 7.0,
    up_offset: float = 1.0,
    interleaved: bool = False,
) -> Tensor:
    _check_options("clamped_swiglu", up, limit, interleaved)
    return gated.forward("clamped_swiglu", gate, up)


@library.fake("clamped_swiglu_backward")
def clamped_swiglu_backward(
    dy: Tensor,
    gate: Tensor,
    up: Tensor | None,
    alpha: float,
    limit: float,
    up_offset: float,
    interleaved: bool,
    output_mask: list[bool],
) -> tuple[Tensor | None, Tensor | None]:
    op = "clamped_swiglu_backward"
    _check_options(op, up, limit, interleaved)
    return gated.backward(op, dy, gate, up, output_mask)


def _check_options(op: str, up: Tensor | None, limit: float, interleaved: bool) -> None:
    if not limit >= 0:
        raise ValueError(f"{op}: limit must be a number of at least 0, got {limit}")
    if interleaved and up is not None:
        raise ValueError(f"{op}: interleaved must be False with an up beside gate, got True")
