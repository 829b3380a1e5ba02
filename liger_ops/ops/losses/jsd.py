"""The generalised Jensen-Shannon divergence of two tensors of log-probabilities."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ... import library
from ...accepted import FRACTION
from . import distribution_loss
from .distribution_loss import DistributionLoss, within
from .divergence import limit


@library.define(
    tags=torch.Tag.needs_fixed_stride_order,
    axes="input=* v, target=* v, shift_labels=*: int -> loss=[* v]",
    dtype="float32+input+target",
    options={"beta": FRACTION},
)
def jsd(
    input: Tensor, target: Tensor, shift_labels: Tensor | None = None,
    beta: float = 0.5, ignore_index: int = -100,
) -> Tensor:  # fmt: skip
    """Compute the generalised Jensen-Shannon divergence of log-probabilities, the mean over tokens.

    With Q = exp(input), P = exp(target) and M = beta * P + (1 - beta) * Q, sums being over classes:

        loss_i = beta * sum(P * log(P / M)) + (1 - beta) * sum(Q * log(Q / M))
        loss_i = sum(P * log(P / Q))                                                 beta = 0
        loss_i = sum(Q * log(Q / P))                                                 beta = 1

    and the result is the mean of loss_i over the tokens whose label is not ignore_index, or over
    all tokens without labels. It is 0 if no token counts, as in Liger-Kernel, and 0 if there are no
    tokens. For a beta of 0 or 1 the equation in the first line is 0; as in Liger-Kernel, the result
    is then the forward or the reverse KL, the limit after division by beta or by 1 - beta. For
    logits, and for each token's divergence, see `divergence`.

    A class of log-probability -inf has probability 0, and so has a class whose probability is too
    small for float32: it adds 0 to a sum that has this probability as a factor, where Liger-Kernel
    gives NaN. For a beta of 0 or 1, a class that has probability 0 in the denominator alone gives
    inf. NaN gives NaN.

    The loss is computed and returned in float32, whatever the dtypes, also under autocast;
    Liger-Kernel rounds it to input's dtype. One number for each token is stored beside the result.
    The number of tokens that count is not read by the host. float64 runs the definition on every
    device.

    Both tensors are differentiable; Liger-Kernel gives only input's gradient. The gradients are
    computed in float32 and rounded once; those of ignored tokens are exactly 0. With n the number
    of tokens that count:

        dinput = dloss / n * (1 - beta) * Q * log(Q / M)
        dtarget = dloss / n * beta * P * log(P / M)
        dinput = -dloss / n * P, dtarget = dloss / n * P * (log(P / Q) + 1)          beta = 0
        dinput = dloss / n * Q * (log(Q / P) + 1), dtarget = -dloss / n * Q          beta = 1

    Args:
        input: (..., V), the student's log-probabilities, floating point, any strides; unit stride
            in the last dimension is fast.
        target: of the same shape, the teacher's log-probabilities; floating point, possibly of
            another dtype.
        shift_labels: (...), int64 or int32, or None. It is only compared with ignore_index.
        beta: target's weight in M, from 0 to 1.
        ignore_index: the label of tokens that do not count.

    Returns:
        (), float32, or float64 if either tensor is.

    Raises:
        TypeError: input or target is not floating point, or shift_labels are not int64 or int32.
        ValueError: input and target have different shapes, shift_labels do not have the shape of
            the tokens, the devices differ, or beta is not from 0 to 1.

    Source: Lin, "Divergence measures based on the Shannon entropy", 1991; Agarwal et al.,
        "On-policy distillation of language models", 2024.

    Example:
        >>> log_q, log_p = torch.tensor([[0.0, -torch.inf]]), torch.tensor([[-torch.inf, 0.0]])
        >>> liger_ops.jsd(log_q, log_p)
        tensor(0.6931)
    """
    options = (shift_labels, beta, ignore_index)
    return distribution_loss.value(form(library.OPS["jsd"].arguments(input, target, *options)))


@library.backward("jsd", "dloss input target shift_labels ... output_mask -> dinput dtarget")
def jsd_backward(call: Any) -> Any:
    """Compute the gradients of `jsd`, whose documentation has the equations."""
    return distribution_loss.gradients(call, form(call))


def form(call: Any) -> DistributionLoss:
    kind, tokens = limit("jsd", call.beta), math.prod(call.input.shape[:-1])
    return DistributionLoss(
        kind, call.input, call.target, call.beta, "batchmean", tokens, within(call)
    )
