"""The SwiGLU activation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ... import library
from .gated import AXES, gate_and_up, gradients, multiplied, silu_gradient, times


@library.define(tags=torch.Tag.needs_fixed_stride_order, axes=AXES, dtype="gate+up")
def swiglu(
    gate: Tensor, up: Tensor | None = None,
    gate_multiplier: float = 1.0, down_multiplier: float = 1.0,
) -> Tensor:  # fmt: skip
    """Apply SwiGLU: multiply up by the SiLU of gate.

        z = gate * gate_multiplier
        y = z * sigmoid(z) * up * down_multiplier

    Everything is computed in float32 and rounded once. Model code rounds to its dtype after every
    operation, among them `silu(gate)` before the product. In float32 and float64 both results are
    the same; in half precision they differ by one or two roundings, and y is closer to the
    equation.

    If one projection returns gate and up as the halves of one tensor (packed; Phi3, GLM4), pass it
    as gate, without up. It is read without a copy, and its gradient is one tensor. Two views of the
    halves are read without a copy too.

    The backward recomputes the activation: only gate and up are saved. float64 runs the definition
    on every device.

    Args:
        gate: (..., N), floating point, any strides; packed, (..., 2N), the gate's N first.
        up: of gate's shape; if its dtype differs, the result has the dtype of PyTorch's gate * up.
            None if gate is packed.
        gate_multiplier: multiplies the gate (Falcon-H1).
        down_multiplier: multiplies the result (Falcon-H1, whose down projection is linear).

    Returns:
        (..., N), contiguous, of the dtype of gate * up.

    Raises:
        TypeError: a tensor is not floating point.
        ValueError: gate and up have different shapes, the width of a packed gate is odd, or the
            devices differ.

    Source: Shazeer, "GLU Variants Improve Transformer", 2020.

    Example:
        >>> liger_ops.swiglu(torch.tensor([1.0, -1.0]), torch.tensor([2.0, 2.0]))
        tensor([ 1.4621, -0.5379])
    """
    gate, up, dtype = gate_and_up(gate, up)
    y = torch.nn.functional.silu(times(gate, gate_multiplier)) * up
    return times(y, down_multiplier).to(dtype).contiguous()


@library.backward("swiglu", "dy gate up ... output_mask -> dgate dup")
def swiglu_backward(call: Any) -> Any:
    """Compute the gradient of `swiglu`.

    With z = gate * gate_multiplier and s = sigmoid(z):

        dgate = dy * s * (1 + z * (1 - s)) * up * gate_multiplier * down_multiplier
        dup   = dy * z * s * down_multiplier
    """
    g, u, _ = gate_and_up(call.gate, call.up)
    dy = times(call.dy.to(g.dtype), call.down_multiplier)
    z = times(g, call.gate_multiplier)
    dgate = times(multiplied(silu_gradient(dy, z), u), call.gate_multiplier)
    return gradients(dgate, multiplied(torch.nn.functional.silu(z), dy), call)
