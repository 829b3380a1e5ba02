"""Sparsemax."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ... import library
from ..tensors import along_dim, widened


@library.compose
def sparsemax(x: Tensor, dim: int = -1) -> Tensor:
    """Apply sparsemax along a dimension: the Euclidean projection on the probability simplex.

        y = max(x - tau, 0), with the tau for which sum(y, dim) = 1

    The elements above tau are the support. tau is exact, up to float32's rounding: no iteration
    stops at a tolerance, and nothing is sorted on a GPU or an NPU. y is computed in float32 and
    rounded once, to x.dtype. An element of -inf gives 0; along dim, elements that are all -inf, or
    contain inf or NaN, give NaN, as in `softmax`.

    The gradient is computed from y, in float32, and rounded once; only y is saved. An element of y
    that is rounded to 0 counts as outside the support. Only float16 rounds elements of the support
    to 0.

    Under autocast on a device, x is cast to float32. float64 runs the definition on every device.

    Args:
        x: floating point, any shape with this dimension, any strides.
        dim: the dimension along which y sums to 1. The last dimension is fast; another is
            transposed to the last, and back.

    Returns:
        y, of x's shape and dtype.

    Raises:
        TypeError: x is not floating point.
        ValueError: x has no such dimension.

    Source: Martins and Astudillo, "From Softmax to Sparsemax: A Sparse Model of Attention and
    Multi-Label Classification", 2016.

    Example:
        >>> liger_ops.sparsemax(torch.tensor([[0.5, 1.0, -1.0]]))
        tensor([[0.2500, 0.7500, 0.0000]])
    """
    return along_dim("sparsemax", "x", sparsemax_forward, x, dim)


@library.define(axes="x=* N -> y=* N")
def sparsemax_forward(x: Tensor) -> Tensor:
    """Compute `sparsemax` along the last dimension.

    Args:
        x: (..., N), floating point, any strides.

    Returns:
        y: (..., N), contiguous, of x's dtype.

    Raises:
        TypeError: x is not floating point.
        ValueError: x has no dimension.

    Example:
        >>> liger_ops.sparsemax_forward(torch.tensor([[3.0, 1.0]]))
        tensor([[1., 0.]])
    """
    wide = widened(x)
    # The result does not change if a number is added to all of a row, so the row's largest element
    # and tau's search need no gradient.
    ordered = wide.detach().sort(-1, descending=True).values
    top = ordered[..., :1]
    gaps = ordered - top
    sizes = torch.arange(1, x.shape[-1] + 1, device=x.device, dtype=wide.dtype)
    # tau is at least the maximum less 1. An element further below is outside the support, and the
    # value to which its gap is clamped has no effect.
    sums = gaps.clamp(min=-1).cumsum(-1)
    inside = 1 + sizes * gaps > sums
    size = inside.sum(-1, keepdim=True)
    threshold = (torch.where(inside, gaps, 0.0).sum(-1, keepdim=True) - 1) / size
    # So far without a gradient: it found the support. tau is computed again, with one.
    below = (wide - top).clamp(min=-1)
    # The comparison is negated so that NaN counts as inside the support, and makes tau NaN.
    support = ~(below <= threshold)
    tau = (torch.where(support, below, 0.0).sum(-1, keepdim=True) - 1) / support.sum(
        -1, keepdim=True
    )
    # The gradient of relu at 0 is 0; that of clamp is 1.
    return torch.relu(below - tau).to(x.dtype).contiguous()


@library.backward("sparsemax_forward", "dy y -> dx")
def sparsemax_backward(call: Any) -> Any:
    """Compute the gradient of `sparsemax` along the last dimension from its result.

    dx = dy - mean(dy over the support)   inside the support, where y > 0
    dx = 0                                outside
    """
    dy, y = call
    wide = widened(y)
    dy = dy.to(wide.dtype)
    support = wide > 0
    total = torch.where(support, dy, 0.0).sum(-1, keepdim=True)
    mean = total / support.sum(-1, keepdim=True)
    return torch.where(support, dy - mean, 0.0 * wide).to(y.dtype).contiguous()


library.autocast("sparsemax_forward", torch.float32)
