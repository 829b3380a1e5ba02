"""Root-mean-square normalisation with a modulation."""

from __future__ import annotations

import torch
from torch import Tensor

from ... import library
from ...accepted import AT_LEAST_0
from ..rows import WHOLE, RowStatistics
from .modulation import modulated
from .rms_norm import scaled

CASTING_MODES = ("llama", "gemma", "none", "float32")


@library.define(
    tags=torch.Tag.needs_fixed_stride_order,
    axes="x=* N, scale=* N, shift=* N, weight=N -> y=* N",
    options={"eps": AT_LEAST_0, "casting_mode": CASTING_MODES},
)
def modulated_rms_norm(
    x: Tensor, scale: Tensor, shift: Tensor | None = None, weight: Tensor | None = None,
    eps: float = 1e-6, offset: float = 0.0, casting_mode: str = "llama",
    *, rows: RowStatistics = WHOLE,
) -> Tensor:  # fmt: skip
    """Normalise by the root mean square over the last dimension, with an adaptive scale and shift.

        y = norm(x) * (1 + scale) + shift
        norm(x) = x / sqrt(mean(x**2, -1) + eps) * (weight + offset)

    as in the blocks of diffusion transformers. A row of scale and shift applies to the whole
    tensor, to the tokens of a sample, or to one token. `casting_mode` says where values are
    rounded; in float32 and float64, and with a scale and a shift of x.dtype, the four modes are the
    same:

    * "llama", "gemma" and "none": norm(x) is the result of `rms_norm` in this casting mode, rounded
      to x.dtype. Then every operation rounds as in PyTorch's code: 1 + scale to the dtype of scale,
      the product to the dtype of x * scale, and y to x.dtype.
    * "float32": everything is computed in float32, and y is rounded once (Wan, where
      `(norm(x.float()) * (1 + scale) + shift).type_as(x)` has a float32 scale and shift).

    In every casting mode the gradient is the equation's, computed in float32 and rounded once. The
    gradients of weight, scale and shift are summed in float32, in an order that does not change
    between runs; those of a sample's scale and shift are sums over the tokens of that sample. The
    backward recomputes 1 / rms from x: only the inputs are saved.

    Rows of scale and shift may be slices of a wider tensor, such as the chunks of a projection, and
    are read without a copy. Under autocast on a device, x and weight are cast to float32, as
    `torch.nn.functional.rms_norm` does, and scale and shift keep their dtypes: 1 + scale rounds as
    in PyTorch's code. float64 runs the definition on every device.

    Args:
        x: (..., N), floating point, any strides.
        scale: (N,), (1, ..., N), the first dimensions of x and N, such as (B, N) for an x of
            (B, T, N), with or without dimensions of size 1 between, or of x's shape. For an x of
            (M, N) also (B, N), where B divides M: each row applies to M / B neighbouring rows.
            Floating point; its dtype may differ from x's.
        shift: of scale's shape, floating point; its dtype may differ. None for no shift.
        weight: (N,), floating point; its dtype may differ from x's. None for no scaling.
        eps: added to the mean square.
        offset: added to the weight. It must be 0 if weight is None.
        casting_mode: "llama", "gemma", "none" or "float32".

    Returns:
        (..., N), contiguous, of x's dtype.

    Raises:
        TypeError: a tensor is not floating point.
        ValueError: scale has none of the shapes above, shift has another shape than scale, weight
            is not (N,), the devices differ, eps is negative, offset is not 0 without a weight, or
            casting_mode is unknown.

    Source: Peebles and Xie, "Scalable Diffusion Models with Transformers", 2023.

    Example:
        >>> x, scale = torch.tensor([[3.0, 4.0]]), torch.tensor([1.0, 0.0])
        >>> liger_ops.modulated_rms_norm(x, scale)
        tensor([[1.6971, 1.1314]])
    """
    if casting_mode == "float32":
        y = scaled(x, weight, eps, offset, "gemma", rows)
    else:
        y = scaled(x, weight, eps, offset, casting_mode, rows).to(x.dtype)
    return modulated(y, scale, shift, casting_mode).to(x.dtype).contiguous()


modulated_rms_norm_backward = library.derive_backward(
    "modulated_rms_norm",
    "dy x scale shift weight eps offset output_mask -> dx dscale dshift dweight",
)
library.autocast("modulated_rms_norm", torch.float32, keep=("scale", "shift"))
