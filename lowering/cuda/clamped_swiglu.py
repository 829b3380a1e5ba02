"""clamped_swiglu: the launch of the gated activations' kernels."""

from __future__ import annotations

from torch import Tensor

from ... import library, meta
from .gated import backward, forward
from .launch import Plan


@library.kernel("clamped_swiglu", "cuda")
def clamped_swiglu(
    gate: Tensor,
    up: Tensor | None = None,
    alpha: float = 1.702,
    limit: float = 7.0,
    up_offset: float = 1.0,
    interleaved: bool = False,
    *,
    plan: Plan | None = None,
) -> Tensor:
    y = meta.clamped_swiglu.clamped_swiglu(gate, up, alpha, limit, up_offset, interleaved)
    options = (alpha, limit, up_offset)
    forward(gate, up, y, "clamped_swiglu", options, interleaved, plan=plan)
    return y


@library.kernel("clamped_swiglu_backward", "cuda")
def clamped_swiglu_backward(
    dy: Tensor,
    gate: Tensor,
    up: Tensor | None,
    alpha: float,
    limit: float,
    up_offset: float,
    interleaved: bool,
    output_mask: list[bool],
    *,
    plan: Plan | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    dgate, dup = meta.clamped_swiglu.clamped_swiglu_backward(
        dy, gate, up, alpha, limit, up_offset, interleaved, output_mask
    )
    options = (alpha, limit, up_offset)
    backward(dy, gate, up, dgate, dup, "clamped_swiglu", options, interleaved, plan=plan)
    return dgate, dup
