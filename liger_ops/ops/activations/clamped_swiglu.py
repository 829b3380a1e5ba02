"""The clamped SwiGLU activation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ... import library
from ...accepted import AT_LEAST_0
from .gated import AXES, gate_and_up, gradients, silu_gradient


@library.define(
    tags=torch.Tag.needs_fixed_stride_order,
    axes=AXES,
    dtype="gate+up",
    options={"limit": AT_LEAST_0},
)
def clamped_swiglu(
    gate: Tensor, up: Tensor | None = None,
    alpha: float = 1.702, limit: float = 7.0, up_offset: float = 1.0, interleaved: bool = False,
) -> Tensor:  # fmt: skip
    """Apply SwiGLU with gate and up clamped, and with a scaled sigmoid.

        g = min(gate, limit)
        u = max(min(up, limit), -limit)
        y = g * sigmoid(alpha * g) * (u + up_offset)

    The defaults are GPT-OSS's. DeepSeek-V4 and GLM5 have alpha = 1 and up_offset = 0.

    Everything is computed in float32 and rounded once; model code rounds to its dtype after each
    operation. As with `torch.clamp`, an element beyond a limit has gradient zero, and one exactly
    on the limit has the gradient of an element inside. NaN stays NaN.

    If one tensor holds both gate and up (packed), pass it as gate, without up. It holds two halves
    or, if interleaved, pairs (gate, up, gate, up), as GPT-OSS's projection returns. It is read
    without a copy, and its gradient is one tensor. Two strided views of it instead would each be
    copied first, and autograd would fill and add two gradients of the packed tensor's size.

    The backward recomputes the activation: only gate and up are saved. float64 runs the definition
    on every device.

    Args:
        gate: (..., N), floating point, any strides; packed, (..., 2N).
        up: of gate's shape; if its dtype differs, the result has the dtype of PyTorch's gate * up.
            None if gate is packed.
        alpha: multiplies the gate in the sigmoid.
        limit: the largest gate, and the largest magnitude of up. inf means no limit.
        up_offset: added to up.
        interleaved: whether a packed gate holds pairs instead of halves.

    Returns:
        (..., N), contiguous, of the dtype of gate * up.

    Raises:
        TypeError: a tensor is not floating point.
        ValueError: gate and up have different shapes, the width of a packed gate is odd, the
            devices differ, limit is negative, or interleaved is True with an up.

    Source: OpenAI, "gpt-oss-120b & gpt-oss-20b Model Card", 2025, and its reference code.

    Example:
        >>> liger_ops.clamped_swiglu(torch.tensor([9.0, 1.0]), torch.tensor([-9.0, 1.0]))
        tensor([-41.9997,   1.6916])
    """
    gate, up, dtype = gate_and_up(gate, up, interleaved)
    # One bound at a time: the gradient of a clamp with both bounds writes in place.
    gate, up = gate.clamp(max=limit), up.clamp(min=-limit).clamp(max=limit)
    return (gate * torch.sigmoid(gate * alpha) * (up + up_offset)).to(dtype).contiguous()


@library.backward("clamped_swiglu", "dy gate up ... output_mask -> dgate dup")
def clamped_swiglu_backward(call: Any) -> Any:
    """Compute the gradient of `clamped_swiglu`.

    With g and u as in `clamped_swiglu`, and s = sigmoid(alpha * g):

        dgate = dy * s * (1 + alpha * g * (1 - s)) * (u + up_offset)    where gate <= limit, else 0
        dup   = dy * g * s                                           where |up| <= limit, else 0
    """
    limit, alpha = call.limit, call.alpha
    g, u, _ = gate_and_up(call.gate, call.up, call.interleaved)
    dy = call.dy.to(g.dtype)
    clamped_g, clamped_u = g.clamp(max=limit), u.clamp(-limit, limit)
    dgate = silu_gradient(dy, clamped_g, alpha) * (clamped_u + call.up_offset) * (g <= limit)
    # The product in parentheses is computed first: it is 0 where dy * clamped_g would overflow.
    dup = dy * (clamped_g * torch.sigmoid(clamped_g * alpha)) * (u.abs() <= limit)
    return gradients(dgate, dup, call, call.interleaved)
