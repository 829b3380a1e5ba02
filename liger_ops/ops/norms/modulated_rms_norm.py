"""Root-mean-square normalisation with a modulation."""

from __future__ import annotations

import torch
from torch import Tensor

from ... import library
from ...accepted import AT_LEAST_0
from ..precision import widened
from .modulation import modulated, modulation_gradients
from .rms_norm import backward_definition, scaled

CASTING_MODES = ("llama", "gemma", "none", "float32")


@library.define(
    strides=torch.Tag.needs_fixed_stride_order,
    axes="x=* N, scale=* N, shift=* N, weight=N -> y=* N",
    options={"eps": AT_LEAST_0, "casting_mode": CASTING_MODES},
)
def modulated_rms_norm(
    x: Tensor, scale: Tensor, shift: Tensor | None = None, weight: Tensor | None = None,
    eps: float = 1e-6, offset: float = 0.0, casting_mode: str = "llama",
) -> Tensor:  # fmt: skip
    """Root-mean-square normalisation over the last dimension, with an adaptive scale and shift.

        y = norm(x) * (1 + scale) + shift
        norm(x) = x / sqrt(mean(x**2, -1) + eps) * (weight + offset)

    as in the blocks of diffusion transformers. A row of scale and shift is for the whole tensor,
    for the tokens of a sample, or for a token. `casting_mode` says where values are rounded; in
    float32 and float64, and with a scale and a shift of x.dtype, the four modes are the same:

    * "llama", "gemma" and "none": norm(x) is that of `rms_norm` in this casting mode, rounded to
      x.dtype. Then every operation rounds as in PyTorch's code: 1 + scale to the dtype of scale,
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
            (M, N) also (B, N), where B divides M: each row is for M / B neighbours. Floating point;
            its dtype may differ from x's.
        shift: of scale's shape, floating point; its dtype may differ. None for no shift.
        weight: (N,), floating point; its dtype may differ from x's. None for no scaling.
        eps: added to the mean square.
        offset: added to the weight. It must be 0 if weight is None.
        casting_mode: "llama", "gemma", "none" or "float32".

    Returns:
        (..., N), contiguous, of x's dtype.

    Raises:
        TypeError: a tensor is not floating point.
        ValueError: a shape, a device, eps, offset or casting_mode is not as above.

    Source: Peebles and Xie, "Scalable Diffusion Models with Transformers", 2023.

    Example:
        >>> x, scale = torch.tensor([[3.0, 4.0]]), torch.tensor([1.0, 0.0])
        >>> liger_ops.modulated_rms_norm(x, scale)
        tensor([[1.6971, 1.1314]])
    """
    if casting_mode == "float32":
        y = scaled(x, weight, eps, offset, "gemma")
    else:
        y = scaled(x, weight, eps, offset, casting_mode).to(x.dtype)
    return modulated(y, scale, shift, casting_mode).to(x.dtype).contiguous()


@library.define(strides=torch.Tag.needs_fixed_stride_order)
def modulated_rms_norm_backward(
    dy: Tensor, x: Tensor, scale: Tensor, shift: Tensor | None, weight: Tensor | None,
    eps: float, offset: float, output_mask: list[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """The gradient of `modulated_rms_norm`.

    With rstd = 1 / sqrt(mean(x**2, -1) + eps), xhat = x * rstd, d = dy * (1 + scale) and
    g = d * (weight + offset), where T are the tokens of a row of scale:

        dx      = rstd * (g - xhat * mean(g * xhat, -1))
        dscale  = sum over T of dy * xhat * (weight + offset)
        dshift  = sum over T of dy
        dweight = sum(d * xhat) over all dimensions but the last

    Args:
        dy: (..., N), any strides.
        x, scale, shift, weight, eps, offset: as given to `modulated_rms_norm`; only shift's form
            is used.
        output_mask: whether dx, dscale, dshift and dweight are computed and allocated.

    Returns:
        dx, dscale, dshift and dweight, contiguous, of the shapes and dtypes of x, scale, shift and
        weight; each may be None.

    Raises:
        TypeError, ValueError: as `modulated_rms_norm`; or dy does not have x's shape.
    """
    y = scaled(widened(x), weight, eps, offset, "gemma")
    d, dscale, dshift = modulation_gradients(dy.to(y.dtype), y, scale, shift, output_mask)
    norm_mask = [output_mask[0], output_mask[3]]
    dx, dweight = backward_definition(d, None, x, weight, eps, offset, norm_mask)
    return dx, dscale, dshift, dweight


library.gradient("modulated_rms_norm")
library.autocast("modulated_rms_norm", torch.float32, keep=("scale", "shift"))
