"""The clamped SwiGLU activation."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import library
from .gated import gate_and_up, gradients, silu_slope


@library.define(strides=torch.Tag.needs_fixed_stride_order)
def clamped_swiglu(
    gate: Tensor,
    up: Tensor | None = None,
    alpha: float = 1.702,
    limit: float = 7.0,
    up_offset: float = 1.0,
    interleaved: bool = False,
) -> Tensor:
    """SwiGLU of a gate and an up held within limits, with a sharper sigmoid.

        g = min(gate, limit)
        u = max(min(up, limit), -limit)
        y = g * sigmoid(alpha * g) * (u + up_offset)

    The defaults are GPT-OSS's. DeepSeek-V4 and GLM5 have alpha = 1 and up_offset = 0.

    Everything is computed in float32 and rounded once; model code rounds to its dtype after each of
    the operations. The gradient of what is beyond a limit is zero, on the limit it is the inside's,
    as `torch.clamp` has it. A NaN stays one.

    Packed, gate and up are one tensor: give it as gate, without up. They lie side by side, or, if
    interleaved, in pairs (gate, up, gate, up), as GPT-OSS's projection makes them. That is read
    where it lies, and its gradient is one tensor too; as two views of every other element, each
    would be copied first, and autograd would fill and add two gradients of twice the size.

    The backward recomputes the activation: nothing but gate and up is saved. float64 runs the
    definition on every device.

    Args:
        gate: (..., N), floating point, any strides; packed, (..., 2N).
        up: like gate, of the same shape; of another dtype, it makes the result of the dtype that
            PyTorch gives their product. None where gate holds both.
        alpha: multiplies the gate in the sigmoid.
        limit: the largest gate, and the largest magnitude of up. inf is none.
        up_offset: added to up.
        interleaved: whether a packed gate holds pairs instead of halves.

    Returns:
        (..., N), contiguous, of the dtype of gate * up.

    Raises:
        TypeError: a tensor is not floating point.
        ValueError: a shape, a device or limit is not as above, the width of a packed gate is odd,
            or interleaved is given with up.

    Source: OpenAI, "gpt-oss-120b & gpt-oss-20b Model Card", 2025, and its reference code.

    Example:
        >>> liger_ops.clamped_swiglu(torch.tensor([9.0, 1.0]), torch.tensor([-9.0, 1.0]))
        tensor([-41.9997,   1.6916])
    """
    gate, up, dtype = gate_and_up(gate, up, interleaved)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (gate * torch.sigmoid(gate * alpha) * (up + up_offset)).to(dtype).contiguous()


@library.define(strides=torch.Tag.needs_fixed_stride_order)
def clamped_swiglu_backward(
    dy: Tensor,
    gate: Tensor,
    up: Tensor | None,
    alpha: float,
    limit: float,
    up_offset: float,
    interleaved: bool,
    output_mask: list[bool],
) -> tuple[Tensor | None, Tensor | None]:
    """The gradient of `clamped_swiglu`.

    With g and u as there, and s = sigmoid(alpha * g):

        dgate = dy * s * (1 + alpha * g * (1 - s)) * (u + up_offset)    where gate <= limit, else 0
        dup   = dy * g * s                                           where |up| <= limit, else 0

    Args:
        dy: (..., N), any strides.
        gate, up, alpha, limit, up_offset, interleaved: as given to `clamped_swiglu`.
        output_mask: whether dgate and dup are wanted; no other is computed or allocated.

    Returns:
        dgate, contiguous, of gate's shape and dtype, or None; dup, of up's, or None. Of a packed
        gate, dgate is the gradient of both.

    Raises:
        TypeError, ValueError: as `clamped_swiglu`; or dy is not of y's shape.
    """
    g, u, _ = gate_and_up(gate, up, interleaved)
    dy = dy.to(g.dtype)
    clamped_g, clamped_u = g.clamp(max=limit), u.clamp(-limit, limit)
    dgate = dy * silu_slope(clamped_g, alpha) * (clamped_u + up_offset) * (g <= limit)
    # The product first: it is 0 where dy * clamped_g overflows.
    dup = dy * (clamped_g * torch.sigmoid(clamped_g * alpha)) * (u.abs() <= limit)
    return gradients(dgate, dup, gate, up, output_mask, interleaved)


library.gradient("clamped_swiglu")
