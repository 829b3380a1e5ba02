"""The Kullback-Leibler divergence of log-probabilities from target probabilities."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ... import library
from ...accepted import FINITE_AT_LEAST_0
from . import distribution_loss
from .distribution_loss import REDUCTIONS, TINY, DistributionLoss


@library.define(
    tags=torch.Tag.needs_fixed_stride_order,
    axes="input=* v, target=* v -> loss=[* v]",
    dtype="float32+input+target",
    options={"reduction": REDUCTIONS, "eps": FINITE_AT_LEAST_0},
)
def kl_div(
    input: Tensor, target: Tensor, reduction: str = "batchmean",
    log_target: bool = False, eps: float = 1e-10,
) -> Tensor:  # fmt: skip
    """Compute the Kullback-Leibler divergence of log-probabilities from a target.

    This is `torch.nn.functional.kl_div`, except for terms of probability 0 and for eps.

        term = target * (log(max(target, eps)) - input)
        term = exp(target) * (target - input)                                        log_target

    The reduction "none" returns the terms, "sum" their sum, "mean" their mean, and "batchmean" the
    sum divided by the size of the first dimension, as in PyTorch: for (B, T, V) that is B. Reshape
    to (B * T, V) for the mean over tokens. Neither input nor target is normalised.

    A term whose probability is 0 is 0, even where input is -inf: there PyTorch and Liger-Kernel
    give NaN. A class with an input of -inf and a probability above 0 gives inf. NaN, and a negative
    probability, give NaN. A loss without terms is 0, where PyTorch's means are NaN.

    eps is Liger-Kernel's: the logarithm of a probability below eps is replaced by that of eps,
    which changes a term by at most eps / e, 4e-11 by default. With an eps of 0 the loss is
    PyTorch's; probabilities below 2**-126 then have the logarithm of 2**-126.

    The loss is computed and returned in float32, whatever the dtypes, also under autocast; PyTorch
    rounds it to input's dtype. Unless the reduction is "none", one number for each row is stored
    beside the result. float64 runs the definition on every device.

    Both tensors are differentiable; Liger-Kernel gives only input's gradient. The gradients are
    computed in float32 and rounded once:

        dinput = -dloss * target, or -dloss * exp(target)                            log_target
        dtarget = dloss * (log(max(target, eps)) - input + (target >= eps))
        dtarget = dloss * exp(target) * (target - input + 1)                         log_target

    Args:
        input: (..., V), log-probabilities, floating point, any strides; unit stride in the last
            dimension is fast.
        target: of the same shape, probabilities or, with log_target, their logarithms; floating
            point, possibly of another dtype.
        reduction: "batchmean", "mean", "sum" or "none".
        log_target: whether target holds logarithms of probabilities.
        eps: at least 0; only used without log_target.

    Returns:
        (), or input's shape for the reduction "none"; float32, or float64 if either tensor is.

    Raises:
        TypeError: a tensor is not floating point.
        ValueError: input and target have different shapes, the devices differ, reduction is
            unknown, or eps is negative or not finite.

    Source: Kullback and Leibler, "On information and sufficiency", 1951.

    Example:
        >>> p = torch.tensor([[0.5, 0.5, 0.0]])
        >>> liger_ops.kl_div(torch.tensor([[0.25, 0.75, 0.0]]).log(), p)
        tensor(0.1438)
    """
    options = (reduction, log_target, eps)
    return distribution_loss.value(form(library.OPS["kl_div"].arguments(input, target, *options)))


@library.backward("kl_div", "dloss input target ... output_mask -> dinput dtarget")
def kl_div_backward(call: Any) -> Any:
    """Compute the gradients of `kl_div`, whose documentation has the equations."""
    return distribution_loss.gradients(call, form(call))


def form(call: Any) -> DistributionLoss:
    kind, eps = "forward_kl" if call.log_target else "kl_div", max(call.eps, TINY)
    return DistributionLoss(kind, call.input, call.target, eps, call.reduction, call.input.shape[0])
