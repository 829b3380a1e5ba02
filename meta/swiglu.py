"""swiglu: checks and outputs."""

from __future__ import annotations

from torch import Tensor

from .. import library
from . import gated


@library.fake("swiglu")
def swiglu(
    gate: Tensor,
    up: Tensor | None = None,
    gate_multiplier: float = 1.0,
    down_multiplier: float = 1.0,
) -> Tensor:
    return gated.forward("swiglu", gate, up)


@library.fake("swiglu_backward")
def swiglu_backward(
    dy: Tensor,
    gate: Tensor,
    up: Tensor | None,
    gate_multiplier: float,
    down_multiplier: float,
    output_mask: list[bool],
) -> tuple[Tensor | None, Tensor | None]:
    return gated.backward("swiglu_backward", dy, gate, up, output_mask)
