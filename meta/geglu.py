"""geglu: checks and outputs."""

from __future__ import annotations

from torch import Tensor

from .. import library
from ..ops.geglu import APPROXIMATIONS
from . import checks, gated


@library.fake("geglu")
def geglu(gate: Tensor, up: Tensor | None = None, approximate: str = "tanh") -> Tensor:
    checks.choice("geglu", "approximate", approximate, APPROXIMATIONS)
    return gated.forward("geglu", gate, up)


@library.fake("geglu_backward")
def geglu_backward(
    dy: Tensor,
    gate: Tensor,
    up: Tensor | None,
    approximate: str,
    output_mask: list[bool],
) -> tuple[Tensor | None, Tensor | None]:
    checks.choice("geglu_backward", "approximate", approximate, APPROXIMATIONS)
    return gated.backward("geglu_backward", dy, gate, up, output_mask)
