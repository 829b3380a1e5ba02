"""Helpers of the gated activations, whose gate and up are two tensors or packed in one."""

from __future__ import annotations

import torch
from torch import Tensor

from ..precision import widened


def gate_and_up(
    gate: Tensor, up: Tensor | None, interleaved: bool = False
) -> tuple[Tensor, Tensor, torch.dtype]:
    """gate and up in the dtype of the arithmetic, and the dtype of the result."""
    if up is None:
        dtype = gate.dtype
        gate, up = (gate[..., ::2], gate[..., 1::2]) if interleaved else gate.chunk(2, -1)
    else:
        dtype = torch.promote_types(gate.dtype, up.dtype)
    wide = widened(torch.empty((), dtype=dtype)).dtype
    return gate.to(wide), up.to(wide), dtype
