"""Cross-entropy of logits and class indices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ... import library
from ...accepted import FINITE_AT_LEAST_0, FRACTION, POSITIVE, Options
from ...record import looked_up
from ..tensors import is_eager, widened

REDUCTIONS = ("none", "mean", "sum")

RESULTS = "loss z_loss lse target_logit total_weight predicted_tokens entropy lse_error"
OPTIONS: Options = {
    "reduction": REDUCTIONS, "label_smoothing": FRACTION, "lse_square_scale": FINITE_AT_LEAST_0,
    "softcap": POSITIVE, "logit_scale": POSITIVE,
}  # fmt: skip


@library.compose
def cross_entropy(
    logits: Tensor, target: Tensor, weight: Tensor | None = None,
    token_weight: Tensor | None = None, num_items_in_batch: Tensor | None = None,
    ignore_index: int = -100, reduction: str = "mean", label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0, softcap: float | None = None, logit_scale: float = 1.0,
) -> Tensor:  # fmt: skip
    """Compute the cross-entropy of logits and class indices, per token or reduced over all tokens.

    With x = softcap * tanh(logits * logit_scale / softcap), or x = logits * logit_scale without
    softcap, for token i and class c of V:

        lse_i = log(sum_c exp(x_ic))
        nll_i = weight[target_i] * (lse_i - x_i,target_i)
        smooth_i = sum_c weight_c * (lse_i - x_ic) / V
        z_i = token_weight_i * weight[target_i] * lse_square_scale * lse_i**2
        loss_i = token_weight_i * ((1 - label_smoothing) * nll_i + label_smoothing * smooth_i) + z_i

    and loss_i = 0 if target_i is ignore_index. The reduction "none" returns loss_i, "sum" returns
    their sum, and "mean" returns the sum divided by num_items_in_batch or, if that is None, by the
    sum of token_weight_i * weight[target_i] over the tokens that are not ignored. If all tokens are
    ignored, the mean is NaN and the sum 0. With its additional options at their defaults, this is
    `torch.nn.functional.cross_entropy`.

    The loss is computed and returned in float32, whatever the dtype of the logits; autocast changes
    nothing. The logits are read once, and never written, widened or normalised in memory: beside
    the result, five numbers per token are stored. float64 runs the definition on every device.

    Only differences from a row's largest logit are exponentiated and summed: adding a number to all
    logits of a row does not change the loss. A term whose factor is 0 is not computed.

    The gradient of the logits is computed from the logits and lse, in float32, and rounded once. An
    ignored token has a gradient of exactly 0, whatever its logits are. weight, token_weight and
    num_items_in_batch have no gradient, and it is an error if one of them requires it.

    This op calls `cross_entropy_forward`, which returns more.

    Args:
        logits: (..., V), floating point, any strides; unit stride in the last dimension is fast.
        target: (...), int64 or int32; each is ignore_index, or from 0 to V - 1.
        weight: (V,), floating point; the weight of each class.
        token_weight: of target's shape, floating point; the weight of each token.
        num_items_in_batch: (), any dtype but bool and complex; the divisor of the mean.
        ignore_index: the target of tokens that do not count.
        reduction: "mean", "sum" or "none".
        label_smoothing: from 0 to 1.
        lse_square_scale: the factor of the z-loss, at least 0.
        softcap: above 0, or None for no cap.
        logit_scale: above 0.

    Returns:
        (), or target's shape for the reduction "none"; float32, or float64 if the logits are.

    Raises:
        TypeError: logits, weight or token_weight is not floating point, target is not int64 or
            int32, or num_items_in_batch is bool or complex.
        ValueError: logits has no class; target or token_weight does not have the shape of the
            tokens, weight is not (V,), or num_items_in_batch is not (); the devices differ; an
            option is outside its range; num_items_in_batch is given with another reduction than
            "mean"; or weight, token_weight or num_items_in_batch requires a gradient.
        IndexError: a target is out of range. A GPU stops with a device-side assertion, and an NPU
            gives NaN; neither reads out of bounds.

    Source: Szegedy et al., "Rethinking the Inception Architecture for Computer Vision", 2016 (label
    smoothing); Chowdhery et al., "PaLM: Scaling Language Modeling with Pathways", 2022 (z-loss).

    Example:
        >>> liger_ops.cross_entropy(torch.zeros(2, 4), torch.tensor([3, -100]))
        tensor(1.3863)
    """
    return cross_entropy_forward(
        logits, target, weight, token_weight, num_items_in_batch,
        ignore_index, reduction, label_smoothing, lse_square_scale, softcap, logit_scale,
    )[0]  # fmt: skip


@library.forward(
    "... return_predicted return_entropy",
    tags=torch.Tag.needs_fixed_stride_order,
    returns=RESULTS,
    axes="logits=* V, target=*: int, weight=V, token_weight=*, num_items_in_batch=: number -> "
    "loss=[*], z_loss=[*], lse=*, target_logit=*, total_weight=, predicted_tokens=*: int64, "
    "entropy=*, lse_error=*",
    dtype="float32+logits",
    options=OPTIONS,
)
def cross_entropy_forward(
    call: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor]:
    """Compute `cross_entropy`, and return its intermediate results too.

    loss, z_loss, lse and target_logit are each differentiable in the logits. lse, lse_error and
    target_logit suffice to compute a loss over a vocabulary that is split over devices: each device
    ignores the targets that it does not hold, and the lse of an ignored token is still computed.

        entropy_i = -sum_c p_ic * log(p_ic), p_ic = exp(x_ic - lse_i)

    Args:
        return_predicted: whether to compute predicted_tokens.
        return_entropy: whether to compute entropy.

    Returns:
        loss: the result of `cross_entropy`.
        z_loss: the z-loss part of loss, with the same reduction.
        lse: of target's shape.
        target_logit: x_i,target_i; of target's shape; 0 for an ignored token.
        total_weight: (); the sum of token_weight_i * weight[target_i] over tokens not ignored.
        predicted_tokens: of target's shape, int64; the first class with the largest logit. None
            without return_predicted.
        entropy: of target's shape; 0 for an ignored token; not differentiable. None without
            return_entropy.
        lse_error: of target's shape; the part of lse that was lost by rounding: log_softmax(x) is
            (x - lse) - lse_error, which is exact for x of any size. 0 where lse is not finite. Not
            differentiable.

        All but predicted_tokens have the dtype of `cross_entropy`'s result.

    Raises:
        TypeError, ValueError, IndexError: as `cross_entropy`.

    Example:
        >>> _, _, lse, *_ = liger_ops.cross_entropy_forward(torch.zeros(1, 4), torch.tensor([3]))
        >>> lse
        tensor([1.3863])
    """
    target, weight, reduction = call.target, call.weight, call.reduction
    x = effective(call.logits, call.softcap, call.logit_scale)
    maximum, log_sum = centred(x)
    lse, lse_error = rounded_lse(maximum, log_sum)
    target_logit = picked(x, target, call.ignore_index)
    within = target != call.ignore_index
    weights, counts = token_weights(target, within, weight, call.token_weight, x.dtype)
    smooth = None
    if call.label_smoothing != 0:
        surprisals = log_sum.unsqueeze(-1) - (x - maximum.unsqueeze(-1))
        if weight is not None:
            surprisals = surprisals * weight.to(x.dtype)
        smooth = surprisals.sum(-1) / x.shape[-1]
    nll = log_sum - (target_logit - maximum)
    loss, z_loss = token_losses(lse, nll, smooth, weights, counts, within, call)
    total_weight = counts.sum()
    loss, z_loss = reduced(loss, z_loss, total_weight, call.num_items_in_batch, reduction)
    predicted_tokens = call.logits.detach().argmax(-1) if call.return_predicted else None
    entropy = _entropy(x.detach(), within) if call.return_entropy else None
    return loss, z_loss, lse, target_logit, total_weight, predicted_tokens, entropy, lse_error


@library.backward(
    "cross_entropy_forward",
    "dloss? dz_loss? dlse? dtarget_logit? logits target weight token_weight"
    " num_items_in_batch lse lse_error total_weight ... -> dlogits",
)
def cross_entropy_backward(call: Any) -> Any:
    """Compute the gradient of `cross_entropy_forward`.

    dloss_i and dz_loss_i are the gradients of a token's loss and z-loss, which include the factor
    of the reduction:

        dx_ic = a_i * p_ic - b_i * weight_c - c_i * (c == target_i)
        p_ic = exp((x_ic - lse_i) - lse_error_i)
        a_i = dloss_i * token_weight_i * ((1 - label_smoothing) * weight[target_i]
                                          + label_smoothing * sum_c weight_c / V)
              + (dloss_i + dz_loss_i) * 2 * z_i / lse_i + dlse_i
        b_i = dloss_i * token_weight_i * label_smoothing / V
        c_i = dloss_i * token_weight_i * (1 - label_smoothing) * weight[target_i] - dtarget_logit_i
        dlogits_ic = dx_ic * logit_scale * (1 - (x_ic / softcap)**2)

    For an ignored token a_i is dlse_i, and b_i and c_i are 0; if dlse_i is 0 or None, dlogits_i is
    0. The logits may be those of a part of the classes, with the lse of all.
    """
    target, weight = call.target, call.weight
    x = effective(call.logits, call.softcap, call.logit_scale)
    within, lse = target != call.ignore_index, call.lse.to(x.dtype)
    weights = token_weights(target, within, weight, call.token_weight, x.dtype)
    class_sum, V = x.shape[-1] if weight is None else weight.to(x.dtype).sum(), x.shape[-1]
    soft, smoothed, hard, alive = gradient_factors(
        call, upstream_of_tokens(call), lse, *weights, within, class_sum, V
    )
    if is_eager(x):
        # lse_error goes into the tokens' factor: subtracted from x, it would take another pass over
        # the logits.
        soft = soft * torch.exp(-call.lse_error.to(x.dtype))
        dx = (x - lse.unsqueeze(-1)).exp_().mul_(soft.unsqueeze(-1))
    else:
        dx = soft.unsqueeze(-1) * torch.exp(log_softmax_of(x, lse, call.lse_error))
    if call.label_smoothing != 0:
        smoothed = smoothed.unsqueeze(-1)
        dx = dx - (smoothed if weight is None else smoothed * weight.to(x.dtype))
    if is_eager(x) and V:
        # The logits may be those of a part of the classes, without the target.
        inside = (target >= 0) & (target < V)
        columns = torch.where(inside, target, 0).long().unsqueeze(-1)
        dx.scatter_add_(-1, columns, -torch.where(inside, hard, 0.0).unsqueeze(-1))
    else:
        is_target = torch.arange(V, device=x.device) == target.unsqueeze(-1)
        dx = dx - torch.where(is_target, hard.unsqueeze(-1), 0.0)
    if call.softcap is not None:
        dx = dx * (1 - (x / call.softcap).square())
    if call.logit_scale != 1:
        dx = dx * call.logit_scale
    if is_eager(x) and x.device.type == "cpu":
        # Few rows are written. On a GPU, finding their indices would wait for the device.
        dx[torch.where(~alive)] = 0.0
    else:
        dx = dx.masked_fill(~alive.unsqueeze(-1), 0.0)
    return dx.to(call.logits.dtype).contiguous()


def effective(logits: Tensor, softcap: float | None, logit_scale: float) -> Tensor:
    """Return x, the scaled and capped logits, in the dtype of the arithmetic."""
    x = widened(logits)
    if logit_scale != 1:
        x = x * logit_scale
    return x if softcap is None else softcap * torch.tanh(x / softcap)


def centred(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the maximum of each row, and log(sum(exp(x - maximum))).

    The maximum is a constant to autograd. A row that contains inf gives NaN, as it does in a
    softmax.
    """
    # A row that is all -inf gets a finite maximum, so that -inf - maximum is not NaN.
    maximum = x.detach().amax(-1, keepdim=True).clamp(min=torch.finfo(x.dtype).min)
    centred = x - maximum
    exponentials = centred.exp_() if is_eager(x) else torch.exp(centred)
    return maximum.squeeze(-1), torch.log(exponentials.sum(-1))


def rounded_lse(maximum: Tensor, log_sum: Tensor) -> tuple[Tensor, Tensor]:
    """Return lse = maximum + log_sum, and its rounding error, which is 0 where lse is not finite.

    In float32, lse of logits near 1e4 is off by up to 5e-4. The logarithm of every probability that
    is computed from the rounded lse alone would be off by as much.
    """
    lse = maximum + log_sum
    total, part = lse.detach(), log_sum.detach()
    # The larger of two numbers, less their rounded sum, is exact: the fast two-sum of Dekker.
    error = torch.where(
        maximum.abs() < part.abs(), (part - total) + maximum, (maximum - total) + part
    )
    return lse, torch.where(total.isfinite(), error, 0.0)


def logsumexp(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return logsumexp over the last dimension, and its rounding error.

    Unlike in `torch.logsumexp`, a row that contains inf gives NaN, as it does in a softmax.
    """
    return rounded_lse(*centred(x))


def log_softmax_of(x: Tensor, lse: Tensor, lse_error: Tensor) -> Tensor:
    """Return the log-probabilities of x, which may be a part of the classes, from lse of all."""
    lse, lse_error = (value.to(x.dtype).unsqueeze(-1) for value in (lse, lse_error))
    centred = x - lse
    return centred.sub_(lse_error) if is_eager(x) else centred - lse_error


def picked(x: Tensor, target: Tensor, ignore_index: int) -> Tensor:
    """Return x at the target, or at each of K targets, (..., K); 0 where a target is ignored.

    Raise OutOfRangeError for a target that is out of range, on a CPU.
    """
    accepted = f"ignore_index, {ignore_index}, or from 0 to {x.shape[-1] - 1}"
    if target.dim() == x.dim():
        ignored = target == ignore_index
        with looked_up("target", accepted):
            listed = x.gather(-1, target.masked_fill(ignored, 0).long())
        return listed.masked_fill(ignored, 0.0)
    # nll_loss takes ignored targets, and raises if another one is out of range.
    with looked_up("target", accepted):
        negated = torch.nn.functional.nll_loss(
            x.reshape(-1, x.shape[-1]),
            target.reshape(-1).long(),
            ignore_index=ignore_index,
            reduction="none",
        )
    return -negated.reshape(target.shape)


def token_weights(
    target: Tensor, within: Tensor, weight: Tensor | None,
    token_weight: Tensor | None, dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return each token's weight, and its product with the class weight; both 0 if not `within`."""
    weights = within.to(dtype)
    if token_weight is not None:
        weights = torch.where(within, token_weight.to(dtype), 0.0)
    if weight is None:
        return weights, weights
    return weights, weights * weight.to(dtype)[torch.where(within, target, 0).long()]


def token_losses(
    lse: Tensor, nll: Tensor, smooth: Tensor | None, weights: Tensor,
    counts: Tensor, within: Tensor, call: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return each token's loss and z-loss, which are 0 if not `within`.

    smooth is None without label smoothing. A term whose factor is 0 is not added: it may be inf or
    NaN.
    """
    label_smoothing, lse_square_scale = call.label_smoothing, call.lse_square_scale
    # Values of ignored tokens may be NaN: they are replaced before any differentiated arithmetic.
    z_loss = loss = torch.zeros_like(counts)
    if label_smoothing != 1:
        loss = (1 - label_smoothing) * counts * torch.where(within, nll, 0.0)
    if smooth is not None:
        loss = loss + label_smoothing * weights * torch.where(within, smooth, 0.0)
    if lse_square_scale != 0:
        z_loss = counts * lse_square_scale * torch.where(within, lse, 0.0).square()
        loss = loss + z_loss
    return loss, z_loss


def reduced(
    loss: Tensor, z_loss: Tensor, total_weight: Tensor,
    num_items_in_batch: Tensor | None, reduction: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if reduction == "none":
        return loss, z_loss
    loss, z_loss = loss.sum(), z_loss.sum()
    if reduction == "sum":
        return loss, z_loss
    items = total_weight if num_items_in_batch is None else num_items_in_batch
    return loss / items, z_loss / items


def upstream(grad: Tensor | None, call: Any) -> Tensor | None:
    """Return the gradient of each token's loss, from the gradient of the reduced loss."""
    if grad is None:
        return None
    if call.reduction == "mean":
        items = call.num_items_in_batch
        grad = grad / (call.total_weight if items is None else items)
    return grad.expand(call.lse.shape)


def upstream_of_tokens(call: Any) -> list[Tensor | None]:
    """Return the gradients of each token's own loss, z-loss, lse and target logit."""
    return [upstream(call.dloss, call), upstream(call.dz_loss, call), call.dlse, call.dtarget_logit]


def gradient_factors(
    call: Any, grads: Sequence[Tensor | None], lse: Tensor, weights: Tensor, counts: Tensor,
    within: Tensor, class_sum: Tensor | int, V: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return a, b and c of `cross_entropy_backward`, and whether a token has any gradient.

    `grads` are the gradients of each token's loss, z-loss, lse and target logit.
    """
    label_smoothing, lse_square_scale = call.label_smoothing, call.lse_square_scale
    zero = torch.zeros_like(lse)
    *of_losses, dlse, dtarget_logit = grads
    dloss, dz_loss = (zero if grad is None else grad.to(lse.dtype) for grad in of_losses)
    hard = (1 - label_smoothing) * dloss * counts
    smoothed = label_smoothing / V * dloss * weights
    soft = hard + smoothed * class_sum
    if lse_square_scale != 0:
        soft = soft + (dloss + dz_loss) * counts * (2 * lse_square_scale) * lse
    if dtarget_logit is not None:
        hard = hard - dtarget_logit.to(lse.dtype)
    soft, smoothed, hard = (torch.where(within, value, 0.0) for value in (soft, smoothed, hard))
    if dlse is None:
        return soft, smoothed, hard, within
    return soft + dlse.to(lse.dtype), smoothed, hard, within | (dlse != 0)


def _entropy(x: Tensor, within: Tensor) -> Tensor:
    log_p = torch.log_softmax(x, -1)
    p = torch.exp(log_p)
    # A class of probability 0 adds 0, although its logarithm is -inf.
    entropy = -torch.where(p == 0, 0.0, p * log_p).sum(-1)
    return torch.where(within, entropy, 0.0)
