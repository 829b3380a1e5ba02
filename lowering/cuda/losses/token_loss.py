"""Arithmetic of single tokens' losses in Triton, and the kernel that reduces the losses of M tokens
and checks their targets.

Values are scalars, or have one element a row. Options that are not in use are None, and kernels are
compiled without them.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from ..sums import four_totals


@triton.jit
def token_weights(target, within, rows, weight_ptr, token_weight_ptr):
    """Return a token's weight, and the product of that and its class's weight, by which the loss
    counts the token. Both are 0 if the target is not one of the classes."""
    weights = within.to(tl.float32)
    if token_weight_ptr is not None:
        loaded = tl.load(token_weight_ptr + rows, mask=within, other=0.0)
        weights = loaded.to(tl.float32)
    counts = weights
    if weight_ptr is not None:
        loaded = tl.load(weight_ptr + target, mask=within, other=0.0)
        counts = weights * loaded.to(tl.float32)
    return weights, counts


@triton.jit
def token_loss(
    lse, log_sum, target_x, weighted_x, classes, weights, counts,
    within, ignored, V, label_smoothing, lse_square_scale,
):  # fmt: skip
    """Compute the loss and the z-loss of a token: 0 where it is ignored, NaN where its target is
    out of range.

    weighted_x is sum_c weight_c * x_c, and classes is sum_c weight_c. x in weighted_x, target_x and
    log_sum are relative to the row's maximum: log_sum - target_x then loses no precision to it.
    """
    loss = counts * (log_sum - target_x)
    if label_smoothing is not None:
        smooth = (classes * log_sum - weighted_x) / V
        loss = (1.0 - label_smoothing) * loss + label_smoothing * weights * smooth
    z_loss = 0.0
    if lse_square_scale is not None:
        z_loss = counts * lse_square_scale * lse * lse
        loss += z_loss
    other = tl.where(ignored, 0.0, float("nan"))
    return tl.where(within, loss, other), tl.where(within, z_loss, other)


@triton.jit
def gradient_factors(
    dloss, dz_loss, lse, classes, weights, counts, within, V, label_smoothing, lse_square_scale
):
    """Compute the factors of the gradient of x_c, which is soft * p_c - smoothed * weight_c, less
    hard if c is the target. All are 0 for a token that does not count."""
    hard = dloss * counts
    soft = hard
    smoothed = 0.0
    if label_smoothing is not None:
        hard = (1.0 - label_smoothing) * hard
        smoothed = tl.where(within, label_smoothing / V * dloss * weights, 0.0)
        soft = hard + smoothed * classes
    if lse_square_scale is not None:
        soft += (dloss + dz_loss) * counts * (2.0 * lse_square_scale) * lse
    return tl.where(within, soft, 0.0), smoothed, tl.where(within, hard, 0.0)


@triton.jit(do_not_specialize=["M", "ignore_index"])
def reduce_kernel(
    losses_ptr, z_losses_ptr, target_ptr, weight_ptr, token_weight_ptr,
    items_ptr, loss_ptr, z_loss_ptr, total_weight_ptr,
    M, V, ignore_index,
    REDUCTION: tl.constexpr, DEPENDENT: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    # A single program, so that the order of the sums never changes.
    if DEPENDENT:
        gdc_wait()
    losses = tl.zeros((BLOCK_M,), tl.float32)
    z_losses = tl.zeros((BLOCK_M,), tl.float32)
    totals = tl.zeros((BLOCK_M,), tl.float32)
    outside = tl.zeros((BLOCK_M,), tl.float32)
    for start in range(0, M, BLOCK_M):
        rows = start + tl.arange(0, BLOCK_M).to(tl.int64)
        mask = rows < M
        target = tl.load(target_ptr + rows, mask=mask, other=0).to(tl.int64)
        counted = mask & (target != ignore_index)
        within = counted & (target >= 0) & (target < V)
        outside += (counted & ~within).to(tl.float32)
        _, counts = token_weights(target, within, rows, weight_ptr, token_weight_ptr)
        totals += counts
        if REDUCTION != "none":
            losses += tl.load(losses_ptr + rows, mask=mask, other=0.0)
            z_losses += tl.load(z_losses_ptr + rows, mask=mask, other=0.0)
    loss, z_loss, total, missing = four_totals(losses, z_losses, totals, outside)
    tl.device_assert(
        missing == 0,
        "cross_entropy: a target is neither ignore_index nor from 0 to V - 1",
    )
    tl.store(total_weight_ptr, total)
    if REDUCTION != "none":
        if REDUCTION == "mean":
            items = total
            if items_ptr is not None:
                items = tl.load(items_ptr).to(tl.float32)
            loss /= items
            z_loss /= items
        tl.store(loss_ptr, loss)
        tl.store(z_loss_ptr, z_loss)
