"""Softmax over the last dimension."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ... import library
from ..rows import WHOLE, RowStatistics
from ..tensors import widened


@library.define(axes="x=* N -> y=* N")
def softmax(x: Tensor, *, rows: RowStatistics = WHOLE) -> Tensor:
    """Apply softmax over the last dimension.

        y = exp(x - max(x, -1)) / sum(exp(x - max(x, -1)), -1)

    y is computed in float32 and rounded once, to x.dtype. As in PyTorch, an element of -inf gives
    0; a row that is all -inf, or that contains inf or NaN, gives NaN.

    The gradient is computed from y, in float32, and rounded once; only y is saved.

    Under autocast on a device, x is cast to float32, as `torch.nn.functional.softmax` does. float64
    runs the definition on every device.

    Args:
        x: (..., N), floating point, any strides.

    Returns:
        (..., N), contiguous, of x's dtype.

    Raises:
        TypeError: x is not floating point.
        ValueError: x has no dimension.

    Example:
        >>> liger_ops.softmax(torch.tensor([[0.0, 0.0, -torch.inf]]))
        tensor([[0.5000, 0.5000, 0.0000]])
    """
    return rows.softmax(widened(x)).to(x.dtype).contiguous()


@library.backward("softmax", "dy y -> dx")
def softmax_backward(call: Any, *, rows: RowStatistics = WHOLE) -> Any:
    """Compute the gradient of `softmax` from its result.

    dx = y * (dy - sum(dy * y, -1))
    """
    dy, y = call
    wide = widened(y)
    dy = dy.to(wide.dtype)
    dx = wide * (dy - rows.total(dy * wide))
    return dx.to(y.dtype).contiguous()


library.autocast("softmax", torch.float32)
