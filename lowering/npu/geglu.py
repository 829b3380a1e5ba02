"""geglu: the launch of the gated activations' kernels."""

from __future__ import annotations

from torch import Tensor

from ... import library, meta
from .gated import backward, forward
from .tiling import Plan


@library.kernel("geglu", "npu")
def geglu(
    gate: Tensor,
    up: Tensor | None = None,
    approximate: str = "tanh",
    *,
    plan: Plan | None = None,
) -> Tensor:
    y = meta.geglu.geglu(gate, up, approximate)
    forward(gate, up, y, f"geglu_{approximate}", plan=plan)
    return y


@library.kernel("geglu_backward", "npu")
def geglu_backward(
    dy: Tensor,
    gate: Tensor,
    up: Tensor | None,
    approximate: str,
    output_mask: list[bool],
    *,
    plan: Plan | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    dgate, dup = meta.geglu.geglu_backward(dy, gate, up, approximate, output_mask)
    backward(dy, gate, up, dgate, dup, f"geglu_{approximate}", plan=plan)
    return dgate, dup
