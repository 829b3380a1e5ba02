"""The squared ReLU activation."""

from __future__ import annotations

import torch
from torch import Tensor

from ... import library
from ..tensors import widened


@library.define(tags=torch.Tag.needs_fixed_stride_order, axes="x=* -> y=*")
def relu_squared(x: Tensor) -> Tensor:
    """Compute the square of relu(x).

        y = max(x, 0)**2

    y is computed in float32 and rounded once. It is bit for bit the result of model code, where the
    square is the only operation that rounds. NaN stays NaN. Only x is saved for the backward.
    float64 runs the definition on every device.

    Args:
        x: floating point, any shape, any strides.

    Returns:
        y, contiguous, of x's shape and dtype.

    Raises:
        TypeError: x is not floating point.

    Source: So et al., "Primer: Searching for Efficient Transformers for Language Modeling", 2021.

    Example:
        >>> liger_ops.relu_squared(torch.tensor([-1.0, 3.0]))
        tensor([0., 9.])
    """
    return torch.relu(widened(x)).square().to(x.dtype).contiguous()


relu_squared_backward = library.derive_backward("relu_squared", "dy x -> dx")
