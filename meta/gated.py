"""The gated activations: what their checks and outputs have in common."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import checks


def forward(op: str, gate: Tensor, up: Tensor | None) -> Tensor:
    """Check gate and up, or a packed gate, and allocate y."""
    shape = check(op, gate, up)
    if up is not None:
        return checks.like(gate, torch.promote_types(gate.dtype, up.dtype))
    return gate.new_empty(shape, requires_grad=False)


def backward(
    op: str, dy: Tensor, gate: Tensor, up: Tensor | None, output_mask: list[bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Check dy, gate and up, and allocate the gradients that are wanted."""
    shape = check(op, gate, up)
    checks.floating(op, dy=dy)
    checks.same_device(op, gate, "gate", dy=dy)
    checks.shape(op, "dy", dy, shape, "the result")
    return checks.like_if(output_mask[0], gate), checks.like_if(output_mask[1], up)


def check(op: str, gate: Tensor, up: Tensor | None) -> Sequence[int]:
    """Check gate and up, or a packed gate; the shape of the result."""
    checks.floating(op, gate=gate, up=up)
    if up is not None:
        checks.same_form(op, gate, "gate", up=up)
        return gate.shape
    if gate.dim() == 0 or gate.shape[-1] % 2 != 0:
        raise ValueError(
            f"{op}: gate must be (..., 2N) without up, which it then holds,"
            f" got shape {tuple(gate.shape)}"
        )
    return (*gate.shape[:-1], gate.shape[-1] // 2)
