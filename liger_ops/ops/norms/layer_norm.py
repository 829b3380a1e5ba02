"""Layer normalisation."""

from __future__ import annotations

import torch
from torch import Tensor

from ... import library
from ...accepted import AT_LEAST_0
from .. import rows
from ..precision import widened


@library.define(axes="x=* N, weight=N, bias=N -> y=* N", options={"eps": AT_LEAST_0})
def layer_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """Layer normalisation over the last dimension.

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
        ValueError: a shape, a device or eps is not as above.

    Source: Ba, Kiros and Hinton, "Layer Normalization", 2016.

    Example:
        >>> liger_ops.layer_norm(torch.tensor([[1.0, 3.0]]))
        tensor([[-1.0000,  1.0000]])
    """
    return affine(x, weight, bias, eps).to(x.dtype).contiguous()


def affine(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """The result of `layer_norm` before it is rounded to x.dtype."""
    xhat, _ = standardised(widened(x), eps)
    if weight is not None:
        xhat = xhat * weight.to(xhat.dtype)
    if bias is not None:
        xhat = xhat + bias.to(xhat.dtype)
    return xhat


@library.define()
def layer_norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None,
    eps: float, output_mask: list[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """The gradient of `layer_norm`.

    With rstd = 1 / sqrt(var(x, -1) + eps), xhat = (x - mean(x, -1)) * rstd and g = dy * weight:

        dx      = rstd * (g - mean(g, -1) - xhat * mean(g * xhat, -1))
        dweight = sum(dy * xhat) over all dimensions but the last
        dbias   = sum(dy) over all dimensions but the last

    Args:
        dy: (..., N), any strides.
        x, weight, bias, eps: as given to `layer_norm`; only bias's dtype is used.
        output_mask: whether dx, dweight and dbias are computed and allocated.

    Returns:
        dx, dweight and dbias, contiguous, of the shapes and dtypes of x, weight and bias; None for
        each that output_mask leaves out.

    Raises:
        TypeError, ValueError: as `layer_norm`; or dy does not have x's shape.
    """
    return backward_definition(dy, x, weight, bias, eps, output_mask)


def backward_definition(
    dy: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None,
    eps: float, output_mask: list[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """`layer_norm_backward`; dy may have the dtype to compute in."""
    xhat, rstd = standardised(widened(x), eps)
    dy = dy.to(xhat.dtype)
    dx = dweight = dbias = None
    if output_mask[0]:
        g = dy if weight is None else dy * weight.to(xhat.dtype)
        dx = standardised_backward(g, xhat, rstd).to(x.dtype).contiguous()
    if output_mask[1] and weight is not None:
        dweight = rows.columns_sum(dy * xhat).to(weight.dtype)
    if output_mask[2] and bias is not None:
        dbias = rows.columns_sum(dy).to(bias.dtype)
    return dx, dweight, dbias


def standardised(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(x - mean) * rstd over the last dimension, and rstd."""
    centred = x - rows.mean(x)
    rstd = torch.rsqrt(rows.mean(centred * centred) + eps)
    return centred * rstd, rstd


def standardised_backward(g: Tensor, xhat: Tensor, rstd: Tensor) -> Tensor:
    """The gradient of x, given the gradient g of xhat."""
    return rstd * (g - rows.mean(g) - xhat * rows.mean(g * xhat))


library.gradient("layer_norm")
library.autocast("layer_norm", torch.float32)
