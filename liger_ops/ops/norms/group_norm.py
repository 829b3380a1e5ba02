"""Group normalisation."""

from __future__ import annotations

import torch
from torch import Tensor

from ... import library
from ...accepted import AT_LEAST_0
from ..tensors import widened
from .layer_norm import standardised


@library.define(axes="x=n C #, weight=C, bias=C -> y=n C #", options={"eps": AT_LEAST_0})
def group_norm(
    x: Tensor, num_groups: int | torch.SymInt, weight: Tensor | None = None,
    bias: Tensor | None = None, eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    """Split C channels into num_groups groups, and normalise each group.

        y[n, c] = (x[n, c] - mean(n, g)) / sqrt(var(n, g) + eps) * weight[c] + bias[c]

    with mean and biased variance over the C / num_groups channels and all positions of the group g
    that holds c. y is computed in float32 and rounded once, to x.dtype. The mean is subtracted
    before anything is squared. The gradients of weight and bias are summed in float32, in an order
    that does not change between runs. The backward recomputes mean and variance from x: only the
    inputs are saved, and the normalised x is never in memory.

    Under autocast on a device, inputs are cast to float32, as `torch.nn.functional.group_norm`
    does. float64 runs the definition on every device.

    Args:
        x: (N, C, *spatial), floating point, any strides.
        num_groups: a divisor of C.
        weight: (C,), floating point; its dtype may differ from x's. None for no scaling.
        bias: (C,), floating point; its dtype may differ from x's. None for no shift.
        eps: added to the variance.

    Returns:
        (N, C, *spatial), contiguous, of x's dtype.

    Raises:
        TypeError: a tensor is not floating point.
        ValueError: x has fewer than two dimensions, weight or bias is not (C,), the devices differ,
            num_groups does not divide C, or eps is negative.

    Source: Wu and He, "Group Normalization", 2018.

    Example:
        >>> liger_ops.group_norm(torch.tensor([[1.0, 3.0, 0.0, 4.0]]), num_groups=2)
        tensor([[-1.0000,  1.0000, -1.0000,  1.0000]])
    """
    xhat = standardised(_groups(widened(x), num_groups), eps).reshape(x.shape)
    if weight is not None:
        xhat = xhat * _per_channel(weight, xhat)
    if bias is not None:
        xhat = xhat + _per_channel(bias, xhat)
    return xhat.to(x.dtype).contiguous()


def _groups(x: Tensor, num_groups: int | torch.SymInt) -> Tensor:
    """Reshape (N, C, *spatial) to (N, num_groups, elements of a group)."""
    length = x.shape[1] // num_groups
    for size in x.shape[2:]:
        length = length * size
    return x.reshape(x.shape[0], num_groups, length)


def _per_channel(weight: Tensor, x: Tensor) -> Tensor:
    return weight.to(x.dtype).reshape(-1, *[1] * (x.dim() - 2))


group_norm_backward = library.derive_backward(
    "group_norm", "dy x num_groups weight bias eps output_mask -> dx dweight dbias"
)
library.autocast("group_norm", torch.float32)
