"""The PolyNorm activation."""

from __future__ import annotations

import torch
from torch import Tensor

from ... import library
from ...accepted import AT_LEAST_0
from ..rows import WHOLE, RowStatistics
from ..tensors import widened


@library.define(axes="x=* N, weight=3, bias=1 -> y=* N", options={"eps": AT_LEAST_0})
def poly_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-6,
    *, rows: RowStatistics = WHOLE,
) -> Tensor:  # fmt: skip
    """Apply the PolyNorm activation: normalised powers of x, weighted and added.

        y = weight[0] * norm(x**3) + weight[1] * norm(x**2) + weight[2] * norm(x) + bias
        norm(u) = u / sqrt(mean(u**2, -1) + eps)

    The powers and y are computed in float32, and y is rounded once, to x.dtype: in half precision
    x**3 does not overflow, as it does in code that rounds it. x**6 overflows in float32 for x of
    2.6e6 or more; norm(x**3) is then 0, as in model code.

    The gradients of weight and bias are summed in float32, in an order that does not change between
    runs. The backward recomputes the three norms from x: only the inputs are saved.

    Under autocast on a device, inputs are cast to float32, as `torch.pow` does. float64 runs the
    definition on every device.

    Args:
        x: (..., N), floating point, any strides.
        weight: (3,), floating point: the weights of x**3, x**2 and x. Its dtype may differ from
            x's.
        bias: a tensor of one element, floating point; its dtype may differ from x's. None for no
            shift.
        eps: added to each mean square.

    Returns:
        (..., N), contiguous, of x's dtype.

    Raises:
        TypeError: a tensor is not floating point.
        ValueError: x has no dimension, weight is not (3,), bias does not have one element, the
            devices differ, or eps is negative.

    Source: Zhuo et al., "Polynomial Composition Activations: Unleashing the Dynamics of Large
    Language Models", 2024.

    Example:
        >>> liger_ops.poly_norm(torch.tensor([[-1.0, 1.0]]), torch.tensor([0.5, 1.0, 2.0]))
        tensor([[-1.5000,  3.5000]])
    """
    wide = widened(x)
    scale = weight.to(wide.dtype)
    square = wide * wide
    terms = [u * torch.rsqrt(rows.mean(u * u) + eps) for u in (square * wide, square, wide)]
    y = scale[0] * terms[0] + scale[1] * terms[1] + scale[2] * terms[2]
    if bias is not None:
        y = y + bias.reshape(()).to(y.dtype)
    return y.to(x.dtype).contiguous()


poly_norm_backward = library.derive_backward(
    "poly_norm", "dy x weight bias eps output_mask -> dx dweight dbias"
)
library.autocast("poly_norm", torch.float32)
