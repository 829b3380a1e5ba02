"""cross_entropy. M tokens, V classes.

The kernels are the passes over the logits; plain PyTorch computes the rest, which is per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....ops.losses import cross_entropy as definition
from ...common.losses.cross_entropy import TokenTensors, register
from ...common.losses.loss_math import effective, log_sum_sq_probs, logit_gradient
from ...common.tensors import cdiv
from ...common.triton_math import LOWEST, VANISHING, rounded_lse
from .. import tiling
from ..tile import load, remaining, tile_offsets, within
from ..tiling import COSTS, Cost, Plan, launch

# (1, 8192): 42.1%, (1, 16384): 83.8%, (2, 1024): 12.9%.
COSTS["cross_entropy"] = Cost({2: 10.1, 4: 10.1}, {2: 10.1, 4: 10.1})
# With the entropy alone. (1, 4096): 67.5%, (2, 1024): 36.1%.
COSTS["cross_entropy_entropy"] = Cost({2: 32.4, 4: 32.4}, {2: 32.4, 4: 32.4})
# With all options. (1, 2048): 93.5%.
COSTS["cross_entropy_options"] = Cost({2: 89.8, 4: 89.8}, {2: 89.8, 4: 89.8})
# (1, 4096): 71.1%, (1, 8192): overflow, (2, 1024): 38.5%.
COSTS["cross_entropy_backward"] = Cost({2: 34.2, 4: 34.2}, {2: 34.2, 4: 34.2})
# With all options, or the entropy's gradient, which takes more with a softcap alone:
# (1, 2048): 61.1%, (1, 4096): 96.2%, (2, 1024): 59.9%.
COSTS["cross_entropy_options_backward"] = Cost({2: 50.4, 4: 50.4}, {2: 50.4, 4: 50.4})


@triton.jit(do_not_specialize=["M"])
def _walk_kernel(
    logits_ptr, weight_ptr, lse_ptr, lse_error_ptr, maximum_ptr, weighted_x_ptr, predicted_ptr,
    entropy_ptr, log_sum_sq_ptr,
    M, V, softcap, logit_scale,
    CENTRED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # Online softmax: each row keeps a running maximum, and a sum of exponentials relative to it.
    rows, cols, offsets = tile_offsets(V, BLOCK_M, BLOCK_N)
    # Whether columns past the last may be loaded as -inf: a softcap would make them finite, and a
    # weighted sum of x NaN.
    BY_ITSELF: tl.constexpr = (softcap is None) and (weighted_x_ptr is None)
    for tile in tl.range(tl.program_id(0).to(tl.int64), tl.cdiv(M, BLOCK_M), tl.num_programs(0)):
        row = tile * BLOCK_M
        row_mask = rows < remaining(M, row, BLOCK_M)
        maximum = tl.full((BLOCK_M, 1), LOWEST, tl.float32)
        sum = tl.zeros((BLOCK_M, 1), tl.float32)
        weighted_x = tl.zeros((BLOCK_M, 1), tl.float32)
        weight_sum = tl.zeros((BLOCK_M, 1), tl.float32)
        expectation = tl.zeros((BLOCK_M, 1), tl.float32)
        squares = tl.zeros((BLOCK_M, 1), tl.float32)
        best = tl.full((BLOCK_M, 1), LOWEST, tl.float32)
        predicted = tl.zeros((BLOCK_M, 1), tl.int32)
        for col in tl.range(0, V, BLOCK_N):
            count = remaining(V, col, BLOCK_N)
            mask = row_mask & (cols < count)
            start = row * V + col
            if BY_ITSELF:
                logits = tl.load(logits_ptr + start + offsets, mask=mask, other=-float("inf"))
                logits = logits.to(tl.float32)
                x = effective(logits, logit_scale, softcap)
            else:
                logits = load(logits_ptr + start, offsets, mask)
                x = effective(logits, logit_scale, softcap)
                capped = x
                # 2 * LOWEST is -inf, and 0 * -inf would be NaN.
                outside = (2.0 - 2.0 * within(cols, count)) * LOWEST
                x += outside
                logits += outside
            higher = tl.maximum(maximum, tl.max(x, axis=1)[:, None])
            exp = tl.exp(x - higher)
            below = maximum - higher
            rescaled = tl.exp(below)
            if weighted_x_ptr is not None:
                class_weight = within(cols, count)
                if weight_ptr is not None:
                    class_weight = load(weight_ptr + col, cols, cols < count)
                if CENTRED:
                    # A sum of weight * (x - maximum): it is corrected when the maximum changes. In
                    # the first turn the sum of weights is 0, which times -inf would be NaN.
                    weighted_x += weight_sum * tl.maximum(below, LOWEST)
                    weight_sum += tl.sum(class_weight, axis=1)[:, None]
                    capped -= higher
                weighted_x += tl.sum(capped * class_weight, axis=1)[:, None]
            if entropy_ptr is not None:
                # VANISHING in place of -inf: the exponential is 0, and 0 * -inf would be NaN.
                expectation += sum * tl.maximum(below, VANISHING)
                products = exp * tl.maximum(x - higher, VANISHING)
                expectation = expectation * rescaled + tl.sum(products, axis=1)[:, None]
            sum = sum * rescaled + tl.sum(exp, axis=1)[:, None]
            maximum = higher
            if log_sum_sq_ptr is not None:
                squares = squares * rescaled * rescaled + tl.sum(exp * exp, axis=1)[:, None]
            if predicted_ptr is not None:
                highest = tl.max(logits, axis=1)[:, None]
                first = tl.argmax(logits, axis=1)[:, None].to(tl.int32) + col
                predicted = tl.where(highest > best, first, predicted)
                best = tl.maximum(best, highest)
        log_sum = tl.log(sum)
        lse, lse_error = rounded_lse(maximum, log_sum)
        tl.store(lse_ptr + row + rows, lse, mask=row_mask)
        tl.store(lse_error_ptr + row + rows, lse_error, mask=row_mask)
        if maximum_ptr is not None:
            tl.store(maximum_ptr + row + rows, maximum, mask=row_mask)
        if weighted_x_ptr is not None:
            tl.store(weighted_x_ptr + row + rows, weighted_x, mask=row_mask)
        if entropy_ptr is not None:
            tl.store(entropy_ptr + row + rows, log_sum - expectation / sum, mask=row_mask)
        if log_sum_sq_ptr is not None:
            log_sum_sq = log_sum_sq_probs(squares, sum)
            tl.store(log_sum_sq_ptr + row + rows, log_sum_sq, mask=row_mask)
        if predicted_ptr is not None:
            tl.store(predicted_ptr + row + rows, predicted, mask=row_mask)


@triton.jit(do_not_specialize=["M"])
def _gradient_kernel(
    logits_ptr, weight_ptr, lse_ptr, soft_ptr, smoothed_ptr, hard_ptr, column_ptr,
    dentropy_ptr, entropy_ptr, dlogits_ptr,
    M, V, softcap, logit_scale,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    rows, cols, offsets = tile_offsets(V, BLOCK_M, BLOCK_N)
    for tile in tl.range(tl.program_id(0).to(tl.int64), tl.cdiv(M, BLOCK_M), tl.num_programs(0)):
        row = tile * BLOCK_M
        row_mask = rows < remaining(M, row, BLOCK_M)
        lse = load(lse_ptr + row, rows, row_mask)
        soft = load(soft_ptr + row, rows, row_mask)
        hard = load(hard_ptr + row, rows, row_mask)
        column = tl.load(column_ptr + row + rows, mask=row_mask, other=0)
        smoothed = 0.0
        if smoothed_ptr is not None:
            smoothed = load(smoothed_ptr + row, rows, row_mask)
        dentropy, entropy = None, None
        if dentropy_ptr is not None:
            dentropy = load(dentropy_ptr + row, rows, row_mask)
            entropy = load(entropy_ptr + row, rows, row_mask)
        for col in tl.range(0, V, BLOCK_N):
            count = remaining(V, col, BLOCK_N)
            mask = row_mask & (cols < count)
            start = row * V + col
            logits = load(logits_ptr + start, offsets, mask)
            # An lse of inf marks a token without a gradient, whose logits may be NaN.
            logits = tl.where(lse != float("inf"), logits, 0.0)
            x = effective(logits, logit_scale, softcap)
            class_weight = 1.0
            if weight_ptr is not None:
                class_weight = load(weight_ptr + col, cols, cols < count)
            is_target = (cols == column - col).to(tl.float32)
            shifted = x - lse
            dx = logit_gradient(
                x, shifted, tl.exp(shifted), class_weight, soft, smoothed,
                hard * is_target, dentropy, entropy, logit_scale, softcap,
                smoothed_ptr is not None,
            )  # fmt: skip
            tl.store(dlogits_ptr + start + offsets, dx.to(dlogits_ptr.dtype.element_ty), mask=mask)


def loss_and_gradient(
    call: Any, logits: Tensor, tokens: TokenTensors, gradient: bool, plan: Plan | None = None
) -> None:
    """Fill the results of each token that are not None.

    logits: (M, V), contiguous; with `gradient`, d(sum of loss) / dlogits is written over them.
    If a target is out of range, its loss is NaN.
    """
    M, V = logits.shape
    if M == 0:
        return
    weight, target, token_weight, loss, z_loss, lse, _, predicted_tokens, entropy, *extras = tokens
    lse_error, log_prob, mean_logits, log_sum_sq = extras
    lse_error = torch.empty_like(lse) if lse_error is None else lse_error
    # Without label smoothing, weighted_x is the sum of x, and not of x less the maximum.
    smoothing = call.label_smoothing != 0
    weighted_x, maximum = mean_logits, None
    if smoothing:
        weighted_x, maximum = torch.empty_like(lse), torch.empty_like(lse)
    predicted = None if predicted_tokens is None else lse.new_empty(M, dtype=torch.int32)
    name = "cross_entropy" if entropy is None else "cross_entropy_entropy"
    if any(extra is not None for extra in (weighted_x, call.softcap, predicted, log_sum_sq)):
        name = "cross_entropy_options"
    forward_plan = plan or tiling.plan(name, V, logits)
    launch(
        _walk_kernel, forward_plan, cdiv(M, forward_plan.BLOCK_M),
        logits, weight if smoothing else None, lse, lse_error, maximum, weighted_x, predicted,
        entropy, log_sum_sq, M, V, call.softcap, _scale(call),
        CENTRED=smoothing,
    )  # fmt: skip
    ignored = target == call.ignore_index
    inside = _inside(target, V, call.ignore_index)
    column = torch.where(inside, target, 0).long()
    picked = logits.gather(1, column.unsqueeze(1)).squeeze(1)
    picked = definition.effective(picked, call.softcap, call.logit_scale)
    target_logit = torch.where(inside, picked, 0.0)
    if mean_logits is not None:
        mean_logits.div_(V)
    nll = lse_error - (target_logit - lse)
    for result in (entropy, mean_logits, log_sum_sq):
        if result is not None:
            result.copy_(torch.where(ignored, 0.0, result))
    if log_prob is not None:
        value = torch.where(inside, -nll, float("nan"))
        log_prob.copy_(torch.where(ignored, 0.0, value))
        for result in (lse, lse_error):
            result.copy_(torch.where(ignored, 0.0, result))
        if predicted_tokens is not None:
            predicted_tokens.copy_(torch.where(ignored, 0, predicted))
        return
    tokens.target_logit.copy_(target_logit)
    weights, counts = definition.token_weights(target, inside, weight, token_weight, torch.float32)
    class_sum = _class_sum(weight, V, call.label_smoothing)
    smooth = None
    if maximum is not None:
        log_sum = (lse - maximum) + lse_error
        smooth = (class_sum * log_sum - weighted_x) / V
    losses = definition.token_losses(lse, nll, smooth, weights, counts, inside, call)
    for result, value in zip((loss, z_loss), losses, strict=True):
        result.copy_(torch.where(inside | ignored, value, float("nan")))
    if predicted_tokens is not None:
        predicted_tokens.copy_(predicted)
    if gradient:
        grads = (torch.ones_like(lse), None, None, None)
        rest = (lse, weights, counts, inside, class_sum, V)
        factors = definition.gradient_factors(call, grads, *rest)
        column = torch.where(inside, target, -1)
        rows = (lse, lse_error)
        _launch_gradient(call, factors, column, None, None, logits, weight, rows, logits, plan)


def gradient(
    call: Any, upstream: Sequence[Tensor | None], logits: Tensor,
    tokens: TokenTensors, dlogits: Tensor, plan: Plan | None = None,
) -> None:  # fmt: skip
    """Fill dlogits, which may be the logits themselves.

    upstream: the gradients of loss, z_loss, lse, target_logit and entropy: (M,) each, of any
    stride, also 0, with the reduction's factor included. logits and dlogits: (M, V), contiguous, as
    are the tokens.
    """
    M, V = logits.shape
    if M == 0:
        return
    weight, target, token_weight, *_ = tokens
    lse, lse_error = tokens.lse, tokens.lse_error
    *upstream, dentropy = upstream
    inside = _inside(target, V, call.ignore_index)
    weights = definition.token_weights(target, inside, weight, token_weight, torch.float32)
    class_sum = _class_sum(weight, V, call.label_smoothing)
    factors = definition.gradient_factors(call, upstream, lse, *weights, inside, class_sum, V)
    entropy = None
    if dentropy is not None:
        soft, smoothed, hard, alive = factors
        dentropy = torch.where(target == call.ignore_index, 0.0, dentropy.to(lse.dtype))
        alive = alive | (dentropy != 0)
        entropy = torch.where(alive, tokens.entropy - lse_error, 0.0)
        factors = (soft, smoothed, hard, alive)
    column = torch.where(inside, target, -1)
    rows = (lse, lse_error)
    _launch_gradient(call, factors, column, dentropy, entropy, logits, weight, rows, dlogits, plan)


def _launch_gradient(
    call: Any, factors: tuple[Tensor, Tensor, Tensor, Tensor], column: Tensor,
    dentropy: Tensor | None, entropy: Tensor | None,
    logits: Tensor, weight: Tensor | None, rows: tuple[Tensor, Tensor], dlogits: Tensor,
    plan: Plan | None,
) -> None:  # fmt: skip
    """Launch the gradient's kernel.

    rows: lse and its error. The kernel computes exp(x - lse) alone: `factor` below corrects it to
        exp((x - lse) - lse_error), and the caller has subtracted the error from the entropy.
    """
    M, V = logits.shape
    lse, lse_error = rows
    factor = torch.exp(-lse_error)
    smoothing = call.label_smoothing != 0
    soft, smoothed, hard, alive = factors
    plain = call.softcap is None and not smoothing and dentropy is None
    name = "cross_entropy" if plain else "cross_entropy_options"
    plan = plan or tiling.plan(f"{name}_backward", V, logits)
    # column is int32, because a comparison of int64 would run as a scalar loop.
    launch(
        _gradient_kernel, plan, cdiv(M, plan.BLOCK_M),
        logits, weight if smoothing else None, torch.where(alive, lse, float("inf")),
        soft * factor, smoothed if smoothing else None, hard, column.int(),
        None if dentropy is None else dentropy * factor, entropy, dlogits,
        M, V, call.softcap, _scale(call),
    )  # fmt: skip


def _scale(call: Any) -> float | None:
    """Return logit_scale, or None if it is 1: the kernel is then compiled without it."""
    return None if call.logit_scale == 1 else call.logit_scale


def _inside(target: Tensor, V: int, ignore_index: int) -> Tensor:
    """Return whether each target is one of the classes."""
    return (target >= 0) & (target < V) & (target != ignore_index)


def _class_sum(weight: Tensor | None, V: int, label_smoothing: float) -> Tensor | int:
    """Return the sum of the classes' weights if label smoothing needs it, else V."""
    return V if weight is None or label_smoothing == 0 else weight.sum(dtype=torch.float32)


def reduce(
    call: Any, V: int, tokens: TokenTensors, loss: Tensor, z_loss: Tensor, total_weight: Tensor
) -> None:
    """Fill total_weight and, unless the reduction is "none", loss and z_loss from the tokens'."""
    weight, target, token_weight, losses, z_losses, *_ = tokens
    inside = _inside(target, V, call.ignore_index)
    _, counts = definition.token_weights(target, inside, weight, token_weight, torch.float32)
    total_weight.copy_(counts.sum())
    if call.reduction != "none":
        results = definition.reduced(
            losses, z_losses, total_weight, call.num_items_in_batch, call.reduction
        )
        for result, value in zip((loss, z_loss), results, strict=True):
            result.copy_(value)


register("npu", tiling.rows, loss_and_gradient, gradient, reduce)
