"""Residual addition and root-mean-square normalisation in one pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ... import library
from ...accepted import AT_LEAST_0
from ..rows import WHOLE, RowStatistics
from .rms_norm import CASTING_MODES, scaled


@library.define(
    axes="x=* N, residual=* N, weight=N -> y=* N, s=* N",
    dtype="x+residual",
    options={"eps": AT_LEAST_0, "casting_mode": CASTING_MODES},
)
def fused_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None = None,
    eps: float = 1e-6, offset: float = 0.0, casting_mode: str = "llama",
    *, rows: RowStatistics = WHOLE,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Add a residual and normalise the sum by its root mean square, over the last dimension.

        s = x + residual
        y = s / sqrt(mean(s**2, -1) + eps) * (weight + offset)

    s is rounded to the dtype of PyTorch's x + residual, and the rounded s is normalised: on a CPU
    the results are bit for bit those of `rms_norm(x + residual, ...)`. See `rms_norm` for the
    casting modes, the precision and autocast.

    The backward adds the gradient of s to the norm's gradient in the same kernel. Only s and weight
    are saved for it, not x and residual.

    Args:
        x: (..., N), floating point, any strides.
        residual: of x's shape; its dtype may differ.
        weight: (N,) or None.
        eps: added to the mean square.
        offset: added to the weight.
        casting_mode: "llama", "gemma" or "none".

    Returns:
        y and s: (..., N) each, contiguous, of the dtype of x + residual.

    Raises:
        TypeError: a tensor is not floating point.
        ValueError: x and residual have different shapes, weight is not (N,), the devices differ,
            eps is negative, offset is not 0 without a weight, or casting_mode is unknown.

    Example:
        >>> y, s = liger_ops.fused_add_rms_norm(torch.ones(1, 2), torch.tensor([[2.0, 3.0]]))
        >>> s
        tensor([[3., 4.]])
    """
    s = (x + residual).contiguous()
    return scaled(s, weight, eps, offset, casting_mode, rows).to(s.dtype).contiguous(), s


def _norm_and_sum(
    s: Tensor, weight: Tensor | None, eps: float, offset: float, *, rows: RowStatistics = WHOLE
) -> tuple[Tensor, Tensor]:
    """Compute the results from the sum s, whose gradient is the gradient of x and of residual.

    The casting mode is "gemma", which rounds nothing: the gradient is the equation's in every mode.
    """
    return scaled(s, weight, eps, offset, "gemma", rows), s


fused_add_rms_norm_backward = library.derive_backward(
    "fused_add_rms_norm",
    "dy ds? s weight eps offset output_mask -> ds dweight",
    _norm_and_sum,
    returns="dx dweight",
)


def _setup_context(ctx: Any, call: Any, output: tuple[Tensor, Tensor]) -> None:
    _, s = output
    ctx.options = (call.eps, call.offset)
    ctx.x_dtype, ctx.residual_dtype = call.x.dtype, call.residual.dtype
    ctx.save_for_backward(s, call.weight)
    # Nothing may use the sum, as in a model's last layer. Its gradient is then None and not zeros.
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dy: Tensor | None, ds: Tensor | None) -> tuple[Tensor | None, ...]:
    s, weight = ctx.saved_tensors
    needs = ctx.needs
    if dy is None:
        dx, dweight = ds, None
    else:
        dx, dweight = fused_add_rms_norm_backward(
            dy, ds, s, weight, *ctx.options, [needs.x or needs.residual, needs.weight]
        )
    return (
        dx.to(ctx.x_dtype) if needs.x and dx is not None else None,
        dx.to(ctx.residual_dtype) if needs.residual and dx is not None else None,
        dweight,
    )


library.gradient("fused_add_rms_norm", _backward, _setup_context)
library.autocast("fused_add_rms_norm", torch.float32)
