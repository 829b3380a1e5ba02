"""Root-mean-square normalisation with a gate."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import library
from ...accepted import AT_LEAST_0
from ..rows import WHOLE, RowStatistics
from ..tensors import widened

ACTIVATIONS = ("silu", "sigmoid")
CASTING_MODES = ("llama", "gemma")


@library.define(
    tags=torch.Tag.needs_fixed_stride_order,
    axes="x=* N, gate=* N, weight=N -> y=* N",
    options={"eps": AT_LEAST_0, "activation": ACTIVATIONS, "casting_mode": CASTING_MODES},
)
def gated_rms_norm(
    x: Tensor, gate: Tensor, weight: Tensor | None = None, eps: float = 1e-6,
    norm_before_gate: bool = True, group_size: int | torch.SymInt | None = None,
    activation: str = "silu", casting_mode: str = "llama",
    *, rows: RowStatistics = WHOLE,
) -> Tensor:  # fmt: skip
    """Normalise by the root mean square over the last dimension, before or after a gate.

    With a = activation(gate), and norm(s) = s / sqrt(mean(s**2) + eps), where the mean is over the
    last dimension or, with `group_size`, over each group of that many neighbours in it:

        y = norm(x) * weight * a      with norm_before_gate (Qwen3-Next, OLMo Hybrid, Kimi Linear)
        y = norm(x * a) * weight      without it (Mamba 2, Bamba, Zamba2, Nemotron-H)

    The activation, the norm and their products are computed in float32. `casting_mode` says which
    intermediate values are rounded; in float32 and float64 both modes are the same:

    * "llama": norm(...) is rounded to x.dtype, and its product with weight to the dtype of
      PyTorch's weight * x (the models above, except Kimi Linear).
    * "gemma": nothing is rounded but y (Kimi Linear, Falcon-H1).

    In both casting modes the gradient is the equation's, computed in float32 and rounded once. The
    gradient of weight is summed over the rows in float32, in an order that does not change between
    runs. The backward recomputes 1 / rms and the activation: only x, gate and weight are saved.

    Views of a wider tensor, such as a slice of a projection, are read without a copy. Under
    autocast the op runs in the dtypes of its inputs, as the models' code does. float64 runs the
    definition on every device.

    Args:
        x: (..., N), floating point, any strides.
        gate: of x's shape, floating point; its dtype may differ from x's.
        weight: (N,), floating point; its dtype may differ from x's. None for no scaling.
        eps: added to the mean square.
        norm_before_gate: whether x is normalised, or x * a.
        group_size: a divisor of N; None for one group.
        activation: "silu" or "sigmoid".
        casting_mode: "llama" or "gemma".

    Returns:
        (..., N), contiguous, of x's dtype.

    Raises:
        TypeError: a tensor is not floating point.
        ValueError: x and gate have different shapes, weight is not (N,), the devices differ, eps is
            negative, group_size does not divide N, or activation or casting_mode is unknown.

    Source: Dao and Gu, "Transformers are SSMs", 2024.

    Example:
        >>> x, gate = torch.tensor([[3.0, 4.0]]), torch.zeros(1, 2)
        >>> liger_ops.gated_rms_norm(x, gate, activation="sigmoid")
        tensor([[0.4243, 0.5657]])
    """
    wide = widened(x)
    a = _activated(gate.to(wide.dtype), activation)
    s = _groups(wide if norm_before_gate else wide * a, group_size)
    y = (s * torch.rsqrt(rows.mean(s * s) + eps)).reshape(x.shape)
    if casting_mode == "llama":
        y = y.to(x.dtype)
    if weight is not None:
        y = y * (weight if casting_mode == "llama" else weight.to(y.dtype))
    if norm_before_gate:
        y = y.to(wide.dtype) * a
    return y.to(x.dtype).contiguous()


def _activated(gate: Tensor, activation: str) -> Tensor:
    return F.silu(gate) if activation == "silu" else torch.sigmoid(gate)


def _groups(x: Tensor, group_size: int | torch.SymInt | None) -> Tensor:
    """Reshape (..., N) to (..., groups, group_size)."""
    if group_size is None:
        return x
    return x.reshape(*x.shape[:-1], x.shape[-1] // group_size, group_size)


gated_rms_norm_backward = library.derive_backward(
    "gated_rms_norm",
    "dy x gate weight eps norm_before_gate group_size activation output_mask -> dx dgate dweight",
)
