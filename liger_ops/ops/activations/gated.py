"""Helpers of the gated activations. Gate and up are two tensors, or packed in one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..tensors import is_eager, widened

# A packed gate has 2 * N columns: two halves, or pairs of neighbours.
AXES = "gate=* 2*N -> y=* N | gate=* n, up=* n -> y=* n"


def gate_and_up(
    gate: Tensor, up: Tensor | None, interleaved: bool = False
) -> tuple[Tensor, Tensor, torch.dtype]:
    """Return gate and up in the dtype of the arithmetic, and the dtype of the result.

    A packed gate, whose `up` is None, is split into its halves or, if interleaved, its pairs.
    """
    if up is None:
        dtype = gate.dtype
        gate, up = (gate[..., ::2], gate[..., 1::2]) if interleaved else gate.chunk(2, -1)
    else:
        dtype = torch.promote_types(gate.dtype, up.dtype)
    wide = widened(torch.empty((), dtype=dtype)).dtype
    return gate.to(wide), up.to(wide), dtype


def gradients(
    dgate: Tensor, dup: Tensor, call: Any, interleaved: bool = False
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients that a backward's call asks for, packed and cast as gate and up are.

    The callers compute dgate and dup by formulas of their own, not by autograd. Autograd multiplies
    dy by up first, which may overflow where the slope is 0, and gives 0 where a NaN is clamped.
    """
    gate, up = call.gate, call.up
    wants_gate, wants_up = call.output_mask
    if up is None:
        if not wants_gate:
            return None, None
        pair = torch.stack((dgate, dup), -1 if interleaved else -2)
        return pair.flatten(-2).to(gate.dtype), None
    return (
        dgate.to(gate.dtype).contiguous() if wants_gate else None,
        dup.to(up.dtype).contiguous() if wants_up else None,
    )


def silu_gradient(dy: Tensor, z: Tensor, alpha: float = 1.0) -> Tensor:
    """Return dy times the derivative of z * sigmoid(alpha * z)."""
    # Beyond 1000 the sigmoid is 0 or 1 even in float64, and alpha * z = inf would give 0 * inf.
    scaled = times(z, alpha).clamp(-1000, 1000)
    if is_eager(dy, z):
        # One pass, where the operations below take five and allocate each result.
        return torch.ops.aten.silu_backward(dy, scaled)
    sigmoid = torch.sigmoid(scaled)
    return dy * (sigmoid * (1 + scaled * (1 - sigmoid)))


def multiplied(x: Tensor, y: Tensor) -> Tensor:
    """Return x * y, in x's memory in eager mode. Nothing else may read x, which has y's dtype."""
    return x.mul_(y) if is_eager(x, y) else x * y


def times(x: Tensor, factor: float) -> Tensor:
    """Return x * factor, or x itself for a factor of 1."""
    return x if factor == 1 else x * factor
