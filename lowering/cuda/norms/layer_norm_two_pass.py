"""The forward of layer_norm, where a program reads its row twice."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ...common.sizes import cdiv, next_power_of_2
from ...common.triton_math import folded
from ..launch import TwoPass, launch
from ..row_sums import first_mean, mean_and_rstd
from .layer_norm_whole_row import affine
from .modulation import modulated_row


@triton.jit(do_not_specialize=["M", "tokens"])
def layer_norm_two_pass_kernel(
    x_ptr, weight_ptr, bias_ptr, scale_ptr, shift_ptr, y_ptr,
    M, N, tokens, stride_x, stride_scale, stride_shift, eps,
    ROUNDS: tl.constexpr,
    BLOCK_N: tl.constexpr, UNROLL: tl.constexpr, TRIPS: tl.constexpr, FOLD: tl.constexpr,
):  # fmt: skip
    # A program has one row. The first pass asks the caches to keep it, for the second.
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * stride_x
    # Both sums in one pass: they are of x - shift, so that a mean far from 0 takes no precision
    # from the variance.
    shift = first_mean(x_ptr, N, BLOCK_N)
    sums = tl.zeros((BLOCK_N // FOLD,), tl.float32)
    squares = tl.zeros((BLOCK_N // FOLD,), tl.float32)
    for trip in range(0, TRIPS):
        for i in tl.static_range(UNROLL):
            cols = (trip * UNROLL + i) * BLOCK_N + tl.arange(0, BLOCK_N)
            mask = cols < N
            x = tl.load(x_ptr + cols, mask=mask, other=0.0, eviction_policy="evict_last")
            x = tl.where(mask, x.to(tl.float32) - shift, 0.0)
            sums += folded(x, FOLD)
            squares += folded(x * x, FOLD)
    mean, rstd, _ = mean_and_rstd(tl.sum(sums, 0), tl.sum(squares, 0), shift, N, eps)
    for trip in range(0, TRIPS):
        for i in tl.static_range(UNROLL):
            cols = (trip * UNROLL + i) * BLOCK_N + tl.arange(0, BLOCK_N)
            mask = cols < N
            x = tl.load(x_ptr + cols, mask=mask, other=0.0, eviction_policy="evict_first")
            xhat = (x.to(tl.float32) - mean) * rstd
            y = affine(xhat, weight_ptr, bias_ptr, cols, N)
            if scale_ptr is not None:
                modulation = (scale_ptr, shift_ptr, stride_scale, stride_shift)
                y = modulated_row(y, modulation, row // tokens, cols, mask, dtype, ROUNDS)
            tl.store(y_ptr + row * N + cols, y.to(dtype), mask=mask)


def plan_two_pass(x: Tensor) -> TwoPass:
    """Plan tiles of an eighth of the row, at most 8192: 4096 rows of 32768 take 0.148 ms, and 0.183
    with tiles of 8192, with which rows of 65536 are faster.
    """
    tile = min(8192, next_power_of_2(x.shape[1]) // 8)
    return TwoPass(tile, tile // 8, unroll=4)


def launch_two_pass(plan: TwoPass, x: Tensor, *args: Any, **constants: Any) -> None:
    launch(
        layer_norm_two_pass_kernel, (x.shape[0],), x,
        *args,
        **constants, BLOCK_N=plan.BLOCK_N, UNROLL=plan.unroll,
        TRIPS=cdiv(x.shape[1], plan.unroll * plan.BLOCK_N),
        # A thread sums 8 neighbours into one accumulator.
        FOLD=min(8, plan.BLOCK_N),
        num_warps=plan.num_warps,
    )  # fmt: skip
