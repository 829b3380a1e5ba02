"""The gated activations: what their checks and outputs have in common."""

from __future__ import annotations

import torch
from torch import Tensor

from . import checks


def forward(op: str, gate: Tensor, up: Tensor | None) -> Tensor:
    """Check gate and up, or a packed gate, and allocate y."""
    checks.floating(op, gate=gate, up=up)
    if up is not None:
        checks.same_form(op, gate, "gate", up=up)
        return checks.like(gate, torch.promote_types(gate.dtype, up.dtype))
    if gate.dim() == 0 or gate.shape[-1] % 2 != 0:
        raise ValueError(
            f"{op}: gate must be (..., 2N) without up, which it then holds,"
            f" got shape {tuple(gate.shape)}"
        )
    return gate.new_empty((*gate.shape[:-1], gate.shape[-1] // 2), requires_grad=False)


def backward(
    op: str, dy: Tensor, gate: Tensor, up: Tensor | None, output_mask: list[bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Check dy, gate and up, and allocate the gradients that are wanted."""
    y = forward(op, gate, up)
    checks.floating(op, dy=dy)
    checks.same_device(op, gate, "gate", dy=dy)
    checks.shape(op, "dy", dy, y.shape, "the result")
    return checks.like_if(output_mask[0], gate), checks.like_if(output_mask[1], up)
