"""swiglu: the launch of the gated activations' kernels."""

from __future__ import annotations

from torch import Tensor

from ... import library, meta
from .gated import backward, forward
from .launch import Plan


@library.kernel("swiglu", "cuda")
def swiglu(
    gate: Tensor,
    up: Tensor | None = None,
    gate_multiplier: float = 1.0,
    down_multiplier: float = 1.0,
    *,
    plan: Plan | None = None,
) -> Tensor:
    y = meta.swiglu.swiglu(gate, up, gate_multiplier, down_multiplier)
    options = (gate_multiplier, down_multiplier, 0.0)
    forward(gate, up, y, "swiglu", options, plan=plan)
    return y


@library.kernel("swiglu_backward", "cuda")
def swiglu_backward(
    dy: Tensor,
    gate: Tensor,
    up: Tensor | None,
    gate_multiplier: float,
    down_multiplier: float,
    output_mask: list[bool],
    *,
    plan: Plan | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    dgate, dup = meta.swiglu.swiglu_backward(
        dy, gate, up, gate_multiplier, down_multiplier, output_mask
    )
    options = (gate_multiplier, down_multiplier, 0.0)
    backward(dy, gate, up, dgate, dup, "swiglu", options, plan=plan)
    return dgate, dup
