"""The PolyNorm activation."""

from __future__ import annotations

import torch
from torch import Tensor

from ... import library
from ...accepted import AT_LEAST_0
from .. import rows
from ..precision import widened


@library.define(axes="x=* N, weight=3, bias=1 -> y=* N", options={"eps": AT_LEAST_0})
def poly_norm(x: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """The PolyNorm activation: normalised powers of x, weighted and added.

        y = weight[0] * norm(x**3) + weight[1] * norm(x**2) + weight[2] * norm(x) + bias
        norm(u) = u / sqrt(mean(u**2, -1) + eps)

    The powers and y are computed in float32, and y is rounded once, to x.dtype: in half precision
    x**3 does not overflow, where it does in code that rounds it. x**6 overflows in float32 from
    2.6e6 on; norm(x**3) is then 0, as in model code.

    The gradients of weight and bias are summed in float32, in an order that does not change between
    runs. The backward recomputes the three norms from x: only the inputs are saved.

    Under autocast on a device, inputs are cast to float32, as `torch.pow` does. float64 runs the
    definition on every device.

    Args:
        x: (..., N), floating point, any strides.
        weight: (3,), floating point: of x**3, x**2 and x. Its dtype may differ from x's.
        bias: a tensor of one element, floating point; its dtype may differ from x's. None for no
            shift.
        eps: added to each mean square.

    Returns:
        (..., N), contiguous, of x's dtype.

    Raises:
        TypeError: a tensor is not floating point.
        ValueError: a shape, a device or eps is not as above.

    Source: Zhuo et al., "Polynomial Composition Activations: Unleashing the Dynamics of Large
    Language Models", 2024.

    Example:
        >>> liger_ops.poly_norm(torch.tensor([[-1.0, 1.0]]), torch.tensor([0.5, 1.0, 2.0]))
        tensor([[-1.5000,  3.5000]])
    """
    wide = widened(x)
    scale = weight.to(wide.dtype)
    square = wide * wide
    terms = [u * _rstd(u, eps) for u in (square * wide, square, wide)]
    y = scale[0] * terms[0] + scale[1] * terms[1] + scale[2] * terms[2]
    if bias is not None:
        y = y + bias.reshape(()).to(y.dtype)
    return y.to(x.dtype).contiguous()


@library.define()
def poly_norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float,
    output_mask: list[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """The gradient of `poly_norm`.

    With rstd_p = 1 / sqrt(mean(x**(2 * p), -1) + eps), n_p = x**p * rstd_p and
    slope_p = weight[3 - p] * p * x**(p - 1) * rstd_p, for p = 3, 2, 1:

        dx             = sum_p slope_p * (dy - n_p * mean(dy * n_p, -1))
        dweight[3 - p] = sum(dy * n_p)
        dbias          = sum(dy)

    Args:
        dy: (..., N), any strides.
        x, weight, bias, eps: as given to `poly_norm`; only bias's dtype is used.
        output_mask: whether dx, dweight and dbias are computed and allocated.

    Returns:
        dx, dweight and dbias, contiguous, of the shapes and dtypes of x, weight and bias; None for
        each that output_mask leaves out.

    Raises:
        TypeError, ValueError: as `poly_norm`; or dy does not have x's shape.
    """
    wide = widened(x)
    scale = weight.to(wide.dtype)
    dy = dy.to(wide.dtype)
    square = wide * wide
    powers = ((square * wide, 3 * square), (square, 2 * wide), (wide, torch.ones_like(wide)))
    dx, sums = torch.zeros_like(wide), []
    for i, (u, slope) in enumerate(powers):
        rstd = _rstd(u, eps)
        normalised = u * rstd
        product = dy * normalised
        sums.append(product.sum())
        dx = dx + scale[i] * slope * rstd * (dy - normalised * rows.mean(product))
    return (
        dx.to(x.dtype).contiguous() if output_mask[0] else None,
        torch.stack(sums).to(weight.dtype) if output_mask[1] else None,
        dy.sum().reshape(bias.shape).to(bias.dtype)
        if output_mask[2] and bias is not None
        else None,
    )


def _rstd(u: Tensor, eps: float) -> Tensor:
    return torch.rsqrt(rows.mean(u * u) + eps)


library.gradient("poly_norm")
library.autocast("poly_norm", torch.float32)
