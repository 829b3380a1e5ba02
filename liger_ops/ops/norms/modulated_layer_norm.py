"""Layer normalisation with a modulation."""

from __future__ import annotations

import torch
from torch import Tensor

from ... import library
from ...accepted import AT_LEAST_0
from ..rows import WHOLE, RowStatistics
from .layer_norm import affine
from .modulation import modulated

CASTING_MODES = ("torch", "float32")


@library.define(
    tags=torch.Tag.needs_fixed_stride_order,
    axes="x=* N, scale=* N, shift=* N, weight=N, bias=N -> y=* N",
    options={"eps": AT_LEAST_0, "casting_mode": CASTING_MODES},
)
def modulated_layer_norm(
    x: Tensor, scale: Tensor, shift: Tensor | None = None, weight: Tensor | None = None,
    bias: Tensor | None = None, eps: float = 1e-6, casting_mode: str = "torch",
    *, rows: RowStatistics = WHOLE,
) -> Tensor:  # fmt: skip
    """Apply layer normalisation over the last dimension, then an adaptive scale and shift (AdaLN).

        y = norm(x) * (1 + scale) + shift
        norm(x) = (x - mean(x, -1)) / sqrt(var(x, -1) + eps) * weight + bias

    with the biased variance, as in the blocks of DiT, Stable Diffusion 3, Flux and Wan. A row of
    scale and shift applies to the whole tensor, to the tokens of a sample, or to one token.
    `casting_mode` says where values are rounded; in float32 and float64, and with a scale and a
    shift of x.dtype, both modes are the same:

    * "torch": norm(x) is computed in float32 and rounded to x.dtype, as `layer_norm` does. Then
      every operation rounds as in PyTorch's code: 1 + scale to the dtype of scale, the product to
      the dtype of x * scale, and y to x.dtype.
    * "float32": everything is computed in float32, and y is rounded once (Wan, where
      `(norm(x.float()) * (1 + scale) + shift).type_as(x)` has a float32 scale and shift).

    In both casting modes the gradient is the equation's, computed in float32 and rounded once. The
    gradients of weight, bias, scale and shift are summed in float32, in an order that does not
    change between runs; those of a sample's scale and shift are sums over the tokens of that
    sample. The backward recomputes mean and variance from x: only the inputs are saved.

    Rows of scale and shift may be slices of a wider tensor, such as the chunks of a projection, and
    are read without a copy. Under autocast on a device, x, weight and bias are cast to float32, as
    `torch.nn.functional.layer_norm` does, and scale and shift keep their dtypes: 1 + scale rounds
    as in PyTorch's code. float64 runs the definition on every device.

    Args:
        x: (..., N), floating point, any strides.
        scale: (N,), (1, ..., N), the first dimensions of x and N, such as (B, N) for an x of
            (B, T, N), with or without dimensions of size 1 between, or of x's shape. For an x of
            (M, N) also (B, N), where B divides M: each row applies to M / B neighbouring rows.
            Floating point; its dtype may differ from x's.
        shift: of scale's shape, floating point; its dtype may differ. None for no shift.
        weight: (N,), floating point; its dtype may differ from x's. None for no scaling.
        bias: (N,), floating point; its dtype may differ from x's. None for no bias.
        eps: added to the variance.
        casting_mode: "torch" or "float32".

    Returns:
        (..., N), contiguous, of x's dtype.

    Raises:
        TypeError: a tensor is not floating point.
        ValueError: scale has none of the shapes above, shift has another shape than scale, weight
            or bias is not (N,), the devices differ, eps is negative, or casting_mode is unknown.

    Source: Peebles and Xie, "Scalable Diffusion Models with Transformers", 2023.

    Example:
        >>> x, scale = torch.tensor([[1.0, 3.0]]), torch.tensor([1.0, 0.0])
        >>> liger_ops.modulated_layer_norm(x, scale, torch.tensor([0.0, 0.5]))
        tensor([[-2.0000,  1.5000]])
    """
    y = affine(x, weight, bias, eps, rows)
    if casting_mode != "float32":
        y = y.to(x.dtype)
    return modulated(y, scale, shift, casting_mode).to(x.dtype).contiguous()


modulated_layer_norm_backward = library.derive_backward(
    "modulated_layer_norm",
    "dy x scale shift weight bias eps output_mask -> dx dscale dshift dweight dbias",
)
library.autocast("modulated_layer_norm", torch.float32, keep=("scale", "shift"))
