"""The GEGLU activation."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ... import library
from .gated import AXES, gate_and_up, gradients

APPROXIMATIONS = ("tanh", "none")
SCALE = 2 * math.sqrt(2 / math.pi)


@library.define(
    tags=torch.Tag.needs_fixed_stride_order,
    axes=AXES,
    dtype="gate+up",
    options={"approximate": APPROXIMATIONS},
)
def geglu(gate: Tensor, up: Tensor | None = None, approximate: str = "tanh") -> Tensor:
    """Apply GEGLU: multiply up by the GELU of gate.

        y = gate * (1 + erf(gate / sqrt(2))) / 2 * up                                       "none"
        y = gate * (1 + tanh(sqrt(2 / pi) * (gate + 0.044715 * gate**3))) / 2 * up          "tanh"

    Everything is computed in float32 and rounded once. Model code rounds `gelu(gate)` to its dtype
    before the product. In float32 and float64 both results are the same; in half precision they
    differ by one rounding, and y is closer to the equation.

    If one projection returns gate and up as the halves of one tensor (packed), pass that tensor as
    gate, without up. It is read without a copy, and its gradient is one tensor. Two views of the
    halves are read without a copy too.

    The backward recomputes the activation: only gate and up are saved. float64 runs the definition
    on every device.

    Args:
        gate: (..., N), floating point, any strides; packed, (..., 2N), the gate's N first.
        up: of gate's shape; if its dtype differs, the result has the dtype of PyTorch's gate * up.
            None if gate is packed.
        approximate: "tanh" or "none", as in `torch.nn.functional.gelu`; the default is Gemma's.

    Returns:
        (..., N), contiguous, of the dtype of gate * up.

    Raises:
        TypeError: a tensor is not floating point.
        ValueError: gate and up have different shapes, the width of a packed gate is odd, the
            devices differ, or approximate is unknown.

    Source: Shazeer, "GLU Variants Improve Transformer", 2020; Hendrycks and Gimpel, "Gaussian Error
        Linear Units (GELUs)", 2016.

    Example:
        >>> liger_ops.geglu(torch.tensor([1.0, -1.0]), torch.tensor([2.0, 2.0]))
        tensor([ 1.6824, -0.3176])
    """
    gate, up, dtype = gate_and_up(gate, up)
    return (_gelu(gate, approximate) * up).to(dtype).contiguous()


@library.backward("geglu", "dy gate up ... output_mask -> dgate dup")
def geglu_backward(call: Any) -> Any:
    """Compute the gradient of `geglu`.

        dgate = dy * up * gelu'(gate)
        dup   = dy * gelu(gate)

    With the exact erf, and phi the density of the normal distribution,
    gelu'(x) = gelu(x) / x + x * phi(x). With tanh, 2v = 2 * sqrt(2 / pi) * (x + 0.044715 * x**3)
    and s = sigmoid(2v), gelu(x) = x * s and gelu'(x) = s * (1 + (1 - s) * x * d(2v)/dx).
    """
    g, u, _ = gate_and_up(call.gate, call.up)
    dy = call.dy.to(g.dtype)
    if call.approximate == "tanh":
        # Beyond 30 the sigmoid is 0 or 1 even in float64, and g**3 = inf would give 0 * inf.
        near = g.clamp(-30, 30)
        sigmoid = _tanh_factor(near)
        slope = sigmoid * (1 + (1 - sigmoid) * near * SCALE * (1 + 0.134145 * near * near))
    else:
        cumulative = (1 + torch.erf(g * math.sqrt(0.5))) / 2
        slope = cumulative + g * torch.exp(-g * g / 2) * (1 / math.sqrt(2 * math.pi))
    return gradients(dy * slope * u, dy * _gelu(g, call.approximate), call)


def _gelu(x: Tensor, approximate: str) -> Tensor:
    if approximate == "tanh":
        return x * _tanh_factor(x)
    return torch.nn.functional.gelu(x)


def _tanh_factor(x: Tensor) -> Tensor:
    """Return (1 + tanh(v)) / 2 as sigmoid(2 * v), which does not cancel where tanh is near -1."""
    return torch.sigmoid(SCALE * x * (1 + 0.044715 * x * x))
