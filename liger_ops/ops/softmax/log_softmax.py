"""The logarithm of softmax over the last dimension."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ... import library
from ..rows import WHOLE, RowStatistics
from ..tensors import widened


@library.define(axes="x=* N -> y=* N")
def log_softmax(x: Tensor, *, rows: RowStatistics = WHOLE) -> Tensor:
    """Compute the logarithm of softmax over the last dimension.

        y = x - max(x, -1) - log(sum(exp(x - max(x, -1)), -1))

    y is computed in float32 and rounded once, to x.dtype. As in PyTorch, an element of -inf gives
    -inf; a row that is all -inf, or that contains inf or NaN, gives NaN.

    The gradient is computed from y, in float32, and rounded once; only y is saved.

    Under autocast on a device, x is cast to float32, as `torch.nn.functional.log_softmax` does.
    float64 runs the definition on every device.

    Args:
        x: (..., N), floating point, any strides.

    Returns:
        (..., N), contiguous, of x's dtype.

    Raises:
        TypeError: x is not floating point.
        ValueError: x has no dimension.

    Example:
        >>> liger_ops.log_softmax(torch.tensor([[0.0, 0.0, -torch.inf]]))
        tensor([[-0.6931, -0.6931,    -inf]])
    """
    return rows.log_softmax(widened(x)).to(x.dtype).contiguous()


@library.backward("log_softmax", "dy y -> dx")
def log_softmax_backward(call: Any, *, rows: RowStatistics = WHOLE) -> Any:
    """Compute the gradient of `log_softmax` from its result.

    dx = dy - exp(y) * sum(dy, -1)
    """
    dy, y = call
    wide = widened(y)
    dy = dy.to(wide.dtype)
    dx = dy - torch.exp(wide) * rows.total(dy)
    return dx.to(y.dtype).contiguous()


library.autocast("log_softmax", torch.float32)
