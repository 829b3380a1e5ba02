"""Layer normalisation."""

from __future__ import annotations

import torch
from torch import Tensor

from ... import library
from ...accepted import AT_LEAST_0
from ..rows import WHOLE, RowStatistics
from ..tensors import widened


@library.define(axes="x=* N, weight=N, bias=N -> y=* N", options={"eps": AT_LEAST_0})
def layer_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5,
    *, rows: RowStatistics = WHOLE,
) -> Tensor:  # fmt: skip
    """Apply layer normalisation over the last dimension.

        y = (x - mean(x, -1)) / sqrt(var(x, -1) + eps) * weight + bias

    with the biased variance. y is computed in float32 and rounded once, to x.dtype. The mean is
    subtracted before anything is squared, so that a mean far larger than the deviation does not
    cancel. The gradients of weight and bias are summed over the rows in float32, in an order that
    does not change between runs. The backward recomputes mean and variance from x: only the inputs
    are saved, and the normalised x is never in memory.

    Under autocast on a device, inputs are cast to float32, as `torch.nn.functional.layer_norm`
    does. float64 runs the definition on every device.

    Args:
        x: (..., N), floating point, any strides.
        weight: (N,), floating point; its dtype may differ from x's. None for no scaling.
        bias: (N,), floating point; its dtype may differ from x's. None for no shift.
        eps: added to the variance.

    Returns:
        (..., N), contiguous, of x's dtype.

    Raises:
        TypeError: a tensor is not floating point.
        ValueError: x has no dimension, weight or bias is not (N,), the devices differ, or eps is
            negative.

    Source: Ba, Kiros and Hinton, "Layer Normalization", 2016.

    Example:
        >>> liger_ops.layer_norm(torch.tensor([[1.0, 3.0]]))
        tensor([[-1.0000,  1.0000]])
    """
    return affine(x, weight, bias, eps, rows).to(x.dtype).contiguous()


def affine(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, rows: RowStatistics
) -> Tensor:
    """Compute the result of `layer_norm`, without rounding it to x.dtype."""
    xhat = standardised(widened(x), eps, rows)
    if weight is not None:
        xhat = xhat * weight.to(xhat.dtype)
    if bias is not None:
        xhat = xhat + bias.to(xhat.dtype)
    return xhat


def standardised(x: Tensor, eps: float, rows: RowStatistics = WHOLE) -> Tensor:
    """Return (x - mean) / sqrt(var + eps), of each row."""
    centred = x - rows.mean(x)
    return centred * torch.rsqrt(rows.mean(centred * centred) + eps)


layer_norm_backward = library.derive_backward(
    "layer_norm", "dy x weight bias eps output_mask -> dx dweight dbias"
)
library.autocast("layer_norm", torch.float32)
