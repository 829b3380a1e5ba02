"""The Triton kernel that reduces the losses of M tokens and checks their targets."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from ..row_sums import four_totals
from .token_loss import token_weights


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
