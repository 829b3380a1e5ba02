"""The total variation distance of two tensors of probabilities."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ... import library
from . import distribution_loss
from .distribution_loss import REDUCTIONS, DistributionLoss, within


@library.define(
    tags=torch.Tag.needs_fixed_stride_order,
    axes="p=* v, q=* v, shift_labels=*: int -> loss=[* v]",
    dtype="float32+p+q",
    options={"reduction": REDUCTIONS},
)
def tvd(
    p: Tensor, q: Tensor, shift_labels: Tensor | None = None,
    reduction: str = "batchmean", ignore_index: int = -100,
) -> Tensor:  # fmt: skip
    """Compute the total variation distance of probabilities.

        term = |p - q| / 2

    The reduction "none" returns the terms, which are 0 for a token whose label is ignore_index,
    "sum" their sum, "batchmean" the sum divided by the number of tokens that count, and "mean" the
    batchmean divided by V. If no token counts, the loss is 0. For logits, and for each token's
    distance, see `divergence`.

    The loss is computed and returned in float32, whatever the dtypes, also under autocast. Unless
    the reduction is "none", one number for each token is stored beside the result. The number of
    tokens that count is not read by the host. float64 runs the definition on every device.

    Both tensors are differentiable; Liger-Kernel gives only p's gradient. With n the number by
    which the reduction divides, the gradients are, rounded once:

        dp = dloss / n * sign(p - q) / 2
        dq = -dp

    Where p and q are equal, both gradients are 0, as PyTorch's gradient of |p - q| is;
    Liger-Kernel's is -1 / 2. The gradients of ignored tokens are exactly 0.

    Args:
        p: (..., V), probabilities, floating point, any strides; unit stride in the last dimension
            is fast.
        q: of the same shape, floating point, possibly of another dtype.
        shift_labels: (...), int64 or int32, or None. It is only compared with ignore_index.
        reduction: "batchmean", "mean", "sum" or "none".
        ignore_index: the label of tokens that do not count.

    Returns:
        (), or p's shape for the reduction "none"; float32, or float64 if either tensor is.

    Raises:
        TypeError: p or q is not floating point, or shift_labels are not int64 or int32.
        ValueError: p and q have different shapes, shift_labels do not have the shape of the tokens,
            the devices differ, or reduction is unknown.

    Source: Wen et al., "f-Divergence minimization for sequence-level knowledge distillation", 2023.

    Example:
        >>> liger_ops.tvd(torch.tensor([[0.5, 0.5, 0.0]]), torch.tensor([[0.25, 0.75, 0.0]]))
        tensor(0.2500)
    """
    options = (shift_labels, reduction, ignore_index)
    return distribution_loss.value(form(library.OPS["tvd"].arguments(p, q, *options)))


@library.backward("tvd", "dloss p q shift_labels ... output_mask -> dp dq")
def tvd_backward(call: Any) -> Any:
    """Compute the gradients of `tvd`, whose documentation has the equations."""
    return distribution_loss.gradients(call, form(call))


def form(call: Any) -> DistributionLoss:
    tokens = math.prod(call.p.shape[:-1])
    return DistributionLoss("tvd", call.p, call.q, 0.0, call.reduction, tokens, within(call))
