"""The Triton kernels of cross_entropy. M tokens, V classes."""

from __future__ import annotations

import triton
import triton.language as tl

from ...common.losses.loss_math import effective, log_sum_sq_probs, logit_gradient
from ...common.triton_math import LOWEST, VANISHING, flushed_exp, rounded_lse
from .token_loss import gradient_factors, token_loss, token_weights


@triton.jit
def _class_sum(classes_ptr, V):
    """Load sum_c weight_c; without class weights it is the number of classes."""
    if classes_ptr is None:
        return V * 1.0
    else:
        return tl.load(classes_ptr)


@triton.jit
def _class_weights(weight_ptr, cols, V, HAS_SMOOTHING: tl.constexpr):
    """Load the weights of the classes in label smoothing: 1 without class weights."""
    if weight_ptr is None or not HAS_SMOOTHING:
        return 1.0
    else:
        return tl.load(weight_ptr + cols, mask=cols < V, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["M", "ignore_index"])
def cross_entropy_kernel(
    logits_ptr, target_ptr, weight_ptr, classes_ptr, token_weight_ptr, loss_ptr,
    z_loss_ptr, lse_ptr, target_logit_ptr, predicted_ptr, entropy_ptr, lse_error_ptr,
    log_prob_ptr, mean_logits_ptr, log_sum_sq_ptr,
    M, V, stride_logits, ignore_index, label_smoothing, lse_square_scale, softcap, logit_scale,
    GRADIENT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    row_mask = rows < M
    target = tl.load(target_ptr + rows, mask=row_mask, other=0).to(tl.int64)
    ignored = target == ignore_index
    cols = tl.arange(0, BLOCK_N)[None, :]
    mask = row_mask[:, None] & (cols < V)
    if log_prob_ptr is not None:
        # The results of an ignored token are 0, and its logits are not read.
        mask = mask & ~ignored[:, None]
    tile_ptr = logits_ptr + rows[:, None] * stride_logits + cols
    logits = tl.load(tile_ptr, mask=mask, other=0.0).to(tl.float32)
    # A target that is ignored or out of range is no column, and must be no offset of a load.
    within = row_mask & (target >= 0) & (target < V) & (target != ignore_index)
    is_target = cols == tl.where(within, target, -1).to(tl.int32)[:, None]

    capped = effective(logits, logit_scale, softcap)
    x = tl.where(mask, capped, -float("inf"))
    # LOWEST: a row of only -inf has lse -inf, not NaN.
    maximum = tl.maximum(tl.max(x, 1), LOWEST)
    shifted = x - maximum[:, None]
    exp = flushed_exp(shifted)
    sum = tl.sum(exp, 1)
    log_sum = tl.log(sum)
    lse, lse_error = rounded_lse(maximum, log_sum)
    target_logit = tl.sum(tl.where(is_target, x, 0.0), 1)
    weighted_x = 0.0
    class_weights = _class_weights(weight_ptr, cols, V, label_smoothing is not None)
    if label_smoothing is not None:
        weighted_x = tl.sum(tl.where(mask, shifted * class_weights, 0.0), 1)
    weights, counts = token_weights(target, within, rows, weight_ptr, token_weight_ptr)
    classes = _class_sum(classes_ptr, V)
    loss, z_loss = token_loss(
        lse, log_sum, target_logit - maximum, weighted_x, classes, weights, counts,
        within, ignored, V, label_smoothing, lse_square_scale,
    )  # fmt: skip
    if log_prob_ptr is None:
        tl.store(loss_ptr + rows, loss, mask=row_mask)
        tl.store(z_loss_ptr + rows, z_loss, mask=row_mask)
        tl.store(lse_ptr + rows, lse, mask=row_mask)
        tl.store(target_logit_ptr + rows, target_logit, mask=row_mask)
    else:
        tl.store(log_prob_ptr + rows, tl.where(ignored, 0.0, -loss), mask=row_mask)
        tl.store(lse_ptr + rows, tl.where(ignored, 0.0, lse), mask=row_mask)
        lse_error = tl.where(ignored, 0.0, lse_error)
    if lse_error_ptr is not None:
        tl.store(lse_error_ptr + rows, lse_error, mask=row_mask)
    if entropy_ptr is not None:
        # Where the exponential is 0, the product is 0 for -inf too.
        expectation = tl.sum(exp * tl.maximum(shifted, VANISHING), 1) / sum
        tl.store(entropy_ptr + rows, tl.where(ignored, 0.0, log_sum - expectation), mask=row_mask)
    if mean_logits_ptr is not None:
        mean = tl.sum(tl.where(mask, capped, 0.0), 1) / V
        tl.store(mean_logits_ptr + rows, tl.where(ignored, 0.0, mean), mask=row_mask)
    if log_sum_sq_ptr is not None:
        log_sum_sq = log_sum_sq_probs(tl.sum(exp * exp, 1), sum)
        tl.store(log_sum_sq_ptr + rows, tl.where(ignored, 0.0, log_sum_sq), mask=row_mask)
    if predicted_ptr is not None:
        logits = tl.where(mask, logits, -float("inf"))
        # The first of equal logits; the last class for a row of NaN, which equals nothing.
        first = tl.min(tl.where(logits == tl.max(logits, 1)[:, None], cols, V - 1), 1)
        tl.store(predicted_ptr + rows, first.to(tl.int64), mask=row_mask)
    if GRADIENT:
        soft, smoothed, hard = gradient_factors(
            1.0, 0.0, lse, classes, weights, counts, within, V, label_smoothing, lse_square_scale
        )
        if label_smoothing is not None:
            smoothed = smoothed[:, None]
        dx = logit_gradient(
            capped, shifted, exp, class_weights, (soft / sum)[:, None],
            smoothed, tl.where(is_target, hard[:, None], 0.0), None, None, logit_scale, softcap,
            label_smoothing is not None,
        )  # fmt: skip
        # An ignored token's logits may hold NaN.
        dx = tl.where(within[:, None], dx, 0.0)
        tl.store(tile_ptr, dx.to(logits_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _lanes_updated(
    logits, x, weight_ptr, cols, V,
    maxima, sums, weighted_xs, weight_sums, expectations, squares, best, predictions,
    HAS_SMOOTHING: tl.constexpr, HAS_MEAN: tl.constexpr, HAS_ENTROPY: tl.constexpr,
    HAS_SQUARES: tl.constexpr, HAS_PREDICTED: tl.constexpr,
):  # fmt: skip
    """Add a tile to the sums of every lane. Past the last column x is -inf.

    The sums of smoothing and of the entropy are those of x less the lane's maximum, and move with
    it.
    """
    LANES: tl.constexpr = maxima.numel
    FOLD: tl.constexpr = x.numel // LANES
    lanes = tl.reshape(x, (LANES, FOLD))
    # `higher` is the lane's new maximum, `below` by how much the old one is below it.
    higher = tl.maximum(maxima, tl.max(lanes, 1))
    shifted = lanes - higher[:, None]
    exp = flushed_exp(shifted)
    below = maxima - higher
    rescaled = flushed_exp(below)
    if HAS_SMOOTHING:
        inside = tl.reshape(cols < V, (LANES, FOLD))
        weights = tl.where(cols < V, _class_weights(weight_ptr, cols, V, True), 0.0)
        weights = tl.reshape(weights, (LANES, FOLD))
        # A lane without columns so far has a sum of weights of 0, and 0 * -inf would be NaN.
        weighted_xs += weight_sums * tl.maximum(below, LOWEST)
        weighted_xs += tl.sum(tl.where(inside, shifted * weights, 0.0), 1)
        weight_sums += tl.sum(weights, 1)
    if HAS_MEAN:
        weighted_xs += tl.sum(tl.reshape(tl.where(cols < V, x, 0.0), (LANES, FOLD)), 1)
    if HAS_ENTROPY:
        # Where the exponential is 0, the product is 0 for -inf too.
        expectations += sums * tl.maximum(below, VANISHING)
        products = exp * tl.maximum(shifted, VANISHING)
        expectations = expectations * rescaled + tl.sum(products, 1)
    sums = sums * rescaled + tl.sum(exp, 1)
    if HAS_SQUARES:
        squares = squares * rescaled * rescaled + tl.sum(exp * exp, 1)
    if HAS_PREDICTED:
        lanes = tl.reshape(logits, (LANES, FOLD))
        highest = tl.max(lanes, 1)
        columns = tl.reshape(cols, (LANES, FOLD))
        first = tl.min(tl.where(lanes == highest[:, None], columns, V - 1), 1)
        predictions = tl.where(highest > best, first, predictions)
        best = tl.maximum(best, highest)
    return higher, sums, weighted_xs, weight_sums, expectations, squares, best, predictions


@triton.jit(do_not_specialize=["ignore_index"])
def cross_entropy_online_kernel(
    logits_ptr, target_ptr, weight_ptr, classes_ptr, token_weight_ptr, loss_ptr,
    z_loss_ptr, lse_ptr, target_logit_ptr, predicted_ptr, entropy_ptr, lse_error_ptr,
    log_prob_ptr, mean_logits_ptr, log_sum_sq_ptr,
    V, stride_logits, ignore_index, label_smoothing, lse_square_scale, softcap, logit_scale,
    GRADIENT: tl.constexpr, BLOCK_N: tl.constexpr, FOLD: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    # A program has one row. A lane is FOLD neighbours of each tile, which one thread holds. A lane
    # keeps its maximum so far and its sum of exponentials relative to that (online softmax); lanes
    # exchange nothing before the row's end. Rescaling the sum takes one exponential more for FOLD
    # elements. To write a gradient, the first pass asks the L2 cache to keep the row.
    POLICY: tl.constexpr = "evict_last" if GRADIENT else ""
    LANES: tl.constexpr = BLOCK_N // FOLD
    HAS_SMOOTHING: tl.constexpr = label_smoothing is not None
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride_logits
    target = tl.load(target_ptr + row).to(tl.int64)
    ignored = target == ignore_index
    within = (target >= 0) & (target < V) & (target != ignore_index)
    # The target's logit is loaded before any thread writes a gradient over it.
    target_logit = tl.load(logits_ptr + target, mask=within, other=0.0).to(tl.float32)
    target_logit = effective(target_logit, logit_scale, softcap)

    maxima = tl.full((LANES,), LOWEST, tl.float32)
    sums = tl.zeros((LANES,), tl.float32)
    weighted_xs = tl.zeros((LANES,), tl.float32)
    weight_sums = tl.zeros((LANES,), tl.float32)
    expectations = tl.zeros((LANES,), tl.float32)
    squares = tl.zeros((LANES,), tl.float32)
    best = tl.full((LANES,), -float("inf"), tl.float32)
    predictions = tl.zeros((LANES,), tl.int32)
    readable = V
    if log_prob_ptr is not None:
        # The results of an ignored token are 0, and its logits are not read.
        readable = tl.where(ignored, 0, V)
    # Whole tiles need no mask; the last one, below, does.
    whole = readable // BLOCK_N * BLOCK_N
    for start in tl.range(0, whole, BLOCK_N, num_stages=NUM_STAGES):
        cols = start + tl.arange(0, BLOCK_N)
        logits = tl.load(logits_ptr + cols, eviction_policy=POLICY).to(tl.float32)
        x = effective(logits, logit_scale, softcap)
        maxima, sums, weighted_xs, weight_sums, expectations, squares, best, predictions = (
            _lanes_updated(
                logits, x, weight_ptr, cols, V,
                maxima, sums, weighted_xs, weight_sums, expectations, squares, best, predictions,
                HAS_SMOOTHING, mean_logits_ptr is not None, entropy_ptr is not None,
                log_sum_sq_ptr is not None, predicted_ptr is not None,
            )
        )  # fmt: skip
    if whole < readable:
        cols = whole + tl.arange(0, BLOCK_N)
        logits = tl.load(
            logits_ptr + cols, mask=cols < V, other=-float("inf"), eviction_policy=POLICY
        ).to(tl.float32)
        x = effective(logits, logit_scale, softcap)
        # softcap maps the -inf past the last column to a finite number.
        if softcap is not None:
            x = tl.where(cols < V, x, -float("inf"))
        maxima, sums, weighted_xs, weight_sums, expectations, squares, best, predictions = (
            _lanes_updated(
                logits, x, weight_ptr, cols, V,
                maxima, sums, weighted_xs, weight_sums, expectations, squares, best, predictions,
                HAS_SMOOTHING, mean_logits_ptr is not None, entropy_ptr is not None,
                log_sum_sq_ptr is not None, predicted_ptr is not None,
            )
        )  # fmt: skip

    maximum = tl.max(maxima, 0)
    rescaled = flushed_exp(maxima - maximum)
    sum = tl.sum(sums * rescaled, 0)
    log_sum = tl.log(sum)
    lse, lse_error = rounded_lse(maximum, log_sum)
    below = tl.maximum(maxima - maximum, LOWEST)
    weights, counts = token_weights(target, within, row, weight_ptr, token_weight_ptr)
    classes = _class_sum(classes_ptr, V)
    loss, z_loss = token_loss(
        lse, log_sum, target_logit - maximum, tl.sum(weighted_xs + weight_sums * below, 0), classes,
        weights, counts, within, ignored, V, label_smoothing, lse_square_scale,
    )  # fmt: skip
    if log_prob_ptr is None:
        tl.store(loss_ptr + row, loss)
        tl.store(z_loss_ptr + row, z_loss)
        tl.store(lse_ptr + row, lse)
        tl.store(target_logit_ptr + row, tl.where(within, target_logit, 0.0))
    else:
        tl.store(log_prob_ptr + row, tl.where(ignored, 0.0, -loss))
        tl.store(lse_ptr + row, tl.where(ignored, 0.0, lse))
        lse_error = tl.where(ignored, 0.0, lse_error)
    if lse_error_ptr is not None:
        tl.store(lse_error_ptr + row, lse_error)
    if entropy_ptr is not None:
        expectations += sums * tl.maximum(below, VANISHING)
        expectation = tl.sum(expectations * rescaled, 0) / sum
        tl.store(entropy_ptr + row, tl.where(ignored, 0.0, log_sum - expectation))
    if mean_logits_ptr is not None:
        # Without smoothing, the sums are those of x itself.
        mean = tl.sum(weighted_xs, 0) / V
        tl.store(mean_logits_ptr + row, tl.where(ignored, 0.0, mean))
    if log_sum_sq_ptr is not None:
        log_sum_sq = log_sum_sq_probs(tl.sum(squares * rescaled * rescaled, 0), sum)
        tl.store(log_sum_sq_ptr + row, tl.where(ignored, 0.0, log_sum_sq))
    if predicted_ptr is not None:
        first = tl.min(tl.where(best == tl.max(best, 0), predictions, V - 1), 0)
        tl.store(predicted_ptr + row, first.to(tl.int64))
    if GRADIENT:
        # The second pass goes backwards and finds the row in the L2 cache. It does not read the row
        # of a token that does not count, and writes zeros.
        soft, smoothed, hard = gradient_factors(
            1.0, 0.0, lse, classes, weights, counts, within, V, label_smoothing, lse_square_scale
        )
        soft /= tl.where(within, sum, 1.0)
        maximum = tl.where(within, maximum, 0.0)
        column = tl.where(within, target, -1).to(tl.int32)
        readable = tl.where(within, V, 0)
        for tile in tl.range(1, tl.cdiv(V, BLOCK_N) + 1, num_stages=1):
            start = (tl.cdiv(V, BLOCK_N) - tile) * BLOCK_N
            cols = start + tl.arange(0, BLOCK_N)
            logits = tl.load(
                logits_ptr + cols, mask=cols < readable, other=0.0, eviction_policy="evict_first"
            ).to(tl.float32)
            x = effective(logits, logit_scale, softcap)
            shifted = x - maximum
            dx = logit_gradient(
                x, shifted, flushed_exp(shifted),
                _class_weights(weight_ptr, cols, V, HAS_SMOOTHING),
                soft, smoothed, tl.where(cols == column, hard, 0.0), None, None,
                logit_scale, softcap, HAS_SMOOTHING,
            )  # fmt: skip
            dx = dx.to(logits_ptr.dtype.element_ty)
            tl.store(logits_ptr + cols, dx, mask=cols < V, cache_modifier=".cs")


@triton.jit
def _upstream(ptr, rows, stride, row_mask):
    """Load the incoming gradient of each token's result, or return 0 without one."""
    if ptr is None:
        return 0.0
    else:
        return tl.load(ptr + rows * stride, mask=row_mask, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["M", "ignore_index"])
def cross_entropy_backward_kernel(
    dloss_ptr, dz_loss_ptr, dlse_ptr, dtarget_logit_ptr, dentropy_ptr, logits_ptr, target_ptr,
    weight_ptr, classes_ptr, token_weight_ptr, lse_ptr, lse_error_ptr, entropy_ptr, dlogits_ptr,
    M, V,
    stride_dloss, stride_dz_loss, stride_dlse, stride_dtarget_logit, stride_dentropy,
    stride_logits, stride_dlogits,
    ignore_index, label_smoothing, lse_square_scale, softcap, logit_scale,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    # The programs along the grid's second dimension share the tiles of the same rows. dlogits may
    # be the logits: a program reads a tile before it writes it.
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    row_mask = rows < M
    target = tl.load(target_ptr + rows, mask=row_mask, other=0).to(tl.int64)
    lse = tl.load(lse_ptr + rows, mask=row_mask, other=0.0)
    dloss = _upstream(dloss_ptr, rows, stride_dloss, row_mask)
    dz_loss = _upstream(dz_loss_ptr, rows, stride_dz_loss, row_mask)
    dlse = _upstream(dlse_ptr, rows, stride_dlse, row_mask)
    dtarget_logit = _upstream(dtarget_logit_ptr, rows, stride_dtarget_logit, row_mask)
    within = row_mask & (target >= 0) & (target < V) & (target != ignore_index)
    weights, counts = token_weights(target, within, rows, weight_ptr, token_weight_ptr)
    soft, smoothed, hard = gradient_factors(
        dloss, dz_loss, lse, _class_sum(classes_ptr, V), weights,
        counts, within, V, label_smoothing, lse_square_scale,
    )  # fmt: skip
    # exp((x - lse) - lse_error) is exp(x - lse) with a factor of the row.
    lse_error = tl.load(lse_error_ptr + rows, mask=row_mask, other=0.0)
    factor = tl.exp(-lse_error)
    soft = ((soft + dlse) * factor)[:, None]
    hard = (hard - tl.where(within, dtarget_logit, 0.0))[:, None]
    if label_smoothing is not None:
        smoothed = smoothed[:, None]
    # The logits of a token without a gradient may hold NaN, and are not read.
    nonzero = within
    if dlse_ptr is not None:
        nonzero = within | (row_mask & (dlse != 0.0))
    dentropy, entropy = None, None
    if dentropy_ptr is not None:
        dentropy = _upstream(dentropy_ptr, rows, stride_dentropy, row_mask)
        dentropy = tl.where(target != ignore_index, dentropy, 0.0)
        nonzero = nonzero | (row_mask & (dentropy != 0.0))
        entropy = tl.load(entropy_ptr + rows, mask=row_mask, other=0.0)
        entropy = tl.where(nonzero, entropy - lse_error, 0.0)[:, None]
        dentropy = (dentropy * factor)[:, None]
    nonzero = nonzero[:, None]
    lse = tl.where(nonzero, lse[:, None], 0.0)
    column = tl.where(within, target, -1).to(tl.int32)[:, None]
    logits_ptr += rows[:, None] * stride_logits
    dlogits_ptr += rows[:, None] * stride_dlogits
    first = tl.program_id(1) * BLOCK_N
    for start in tl.range(first, V, tl.num_programs(1) * BLOCK_N, num_stages=NUM_STAGES):
        cols = start + tl.arange(0, BLOCK_N)[None, :]
        mask = cols < V
        logits = tl.load(logits_ptr + cols, mask=mask & nonzero, other=0.0).to(tl.float32)
        x = effective(logits, logit_scale, softcap)
        shifted = x - lse
        dx = logit_gradient(
            x, shifted, flushed_exp(shifted),
            _class_weights(weight_ptr, cols, V, label_smoothing is not None), soft,
            smoothed, tl.where(cols == column, hard, 0.0), dentropy, entropy,
            logit_scale, softcap, label_smoothing is not None,
        )  # fmt: skip
        dx = dx.to(dlogits_ptr.dtype.element_ty)
        tl.store(dlogits_ptr + cols, dx, mask=mask & row_mask[:, None])
