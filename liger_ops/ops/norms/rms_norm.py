"""Root-mean-square normalisation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ... import library
from ...accepted import AT_LEAST_0
from ..rows import WHOLE, RowStatistics
from ..tensors import widened

CASTING_MODES = ("llama", "gemma", "none")


@library.define(
    axes="x=* N, weight=N -> y=* N", options={"eps": AT_LEAST_0, "casting_mode": CASTING_MODES}
)
def rms_norm(
    x: Tensor, weight: Tensor | None = None,
    eps: float = 1e-6, offset: float = 0.0, casting_mode: str = "llama",
    *, rows: RowStatistics = WHOLE,
) -> Tensor:  # fmt: skip
    """Normalise by the root mean square over the last dimension.

        y = x / sqrt(mean(x**2, -1) + eps) * (weight + offset)

    `casting_mode` says where values are rounded to x.dtype; in float32 and float64 the three modes
    are the same:

    * "llama": x / rms is computed in float32 and rounded to x.dtype; its product with
      (weight + offset) is computed in float32 and rounded (Llama, Mistral, Qwen, Phi).
    * "gemma": everything is computed in float32 and rounded once (Gemma, OLMo2, GPT-OSS,
      `torch.nn.RMSNorm`).
    * "none": every operation rounds to x.dtype, as in code without casts. The mean is accumulated
      in float32 and then rounded.

    In every casting mode the gradient is the equation's, computed in float32 and rounded once. The
    gradient of weight is summed over the rows in float32, in an order that does not change between
    runs. The backward recomputes 1 / rms from x: only x and weight are saved, and the normalised x
    is never in memory.

    Under autocast on a device, inputs are cast to float32, as `torch.nn.functional.rms_norm` does.
    float64 runs the definition on every device.

    Args:
        x: (..., N), floating point, any strides.
        weight: (N,), floating point; its dtype may differ from x's. None for no scaling.
        eps: added to the mean square.
        offset: added to the weight: 1.0 for models that store weight - 1 (Gemma). It must be 0 if
            weight is None.
        casting_mode: "llama", "gemma" or "none".

    Returns:
        (..., N), contiguous, of x's dtype.

    Raises:
        TypeError: a tensor is not floating point.
        ValueError: x has no dimension, weight is not (N,), the devices differ, eps is negative,
            offset is not 0 without a weight, or casting_mode is unknown.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.

    Example:
        >>> liger_ops.rms_norm(torch.tensor([[3.0, 4.0]]))
        tensor([[0.8485, 1.1314]])
    """
    return scaled(x, weight, eps, offset, casting_mode, rows).to(x.dtype).contiguous()


def scaled(
    x: Tensor, weight: Tensor | None, eps: float, offset: float, casting_mode: str,
    rows: RowStatistics = WHOLE,
) -> Tensor:  # fmt: skip
    """Compute the result of `rms_norm`, without rounding it to x.dtype."""
    if casting_mode == "none":
        y = x * torch.rsqrt(rows.mean(x * x) + eps)
        return y if weight is None else y * (widened(weight) + offset).to(x.dtype)
    wide = widened(x)
    y = wide * torch.rsqrt(rows.mean(wide * wide) + eps)
    if weight is not None:
        if casting_mode == "llama":
            y = widened(y.to(x.dtype))
        y = y * (weight.to(y.dtype) + offset)
    return y


@library.backward("rms_norm", "dy x weight eps offset output_mask -> dx dweight")
def rms_norm_backward(call: Any, *, rows: RowStatistics = WHOLE) -> Any:
    """Compute the gradient of `rms_norm`, of every casting mode, in float32, rounded once.

    With g = dy * (weight + offset):

        dx      = g / rms - x * mean(g * x, -1) / rms**3
        dweight = sum(dy * x / rms), over all rows

    Autograd of the definition has the same roundings, and takes three times as long on a CPU.
    """
    dy, x, weight, dx, dweight = widened(call.dy), widened(call.x), call.weight, None, None
    rstd = torch.rsqrt(rows.mean(x * x) + call.eps)
    wants_x, wants_weight = call.output_mask
    if wants_x:
        g = dy if weight is None else dy * (weight.to(dy.dtype) + call.offset)
        # One half for each factor of x * x, added in turn: the roundings of autograd.
        half = x * (-0.5 * rows.mean(g * x) * rstd.pow(3))
        dx = (g * rstd + half + half).to(call.x.dtype).contiguous()
    if wants_weight and weight is not None:
        dweight = (dy * (x * rstd)).sum_to_size(weight.shape).to(weight.dtype)
    return dx, dweight


library.autocast("rms_norm", torch.float32)
