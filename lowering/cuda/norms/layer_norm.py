"""layer_norm.

Whole rows: a program reads them once and holds them in registers. Two passes: a program reads its
row twice.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ...common.norms.layer_norm import register
from ...common.norms.modulation import PLAIN, Modulation
from ...common.tensors import cdiv, contiguous, next_power_of_2
from ...common.triton_math import folded, to_float32_again
from ..launch import Plan, TwoPass, WholeRow, launch, launch_whole_rows, plan_whole_rows, rows
from ..sums import first_mean, mean_and_rstd, store_column_sums, two_row_sums
from .modulation import constants_of, modulated_row, own_sample
from .norm_backward import NormBackward, launch_norm_backward
from .norm_backward_launch import launch_backward, plan_with_both_sums


@triton.jit
def affine(xhat, weight_ptr, bias_ptr, cols, N):
    """Compute xhat * weight + bias; each may be None."""
    if weight_ptr is not None:
        xhat *= tl.load(weight_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        xhat += tl.load(bias_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
    return xhat


@triton.jit(do_not_specialize=["M", "tokens"])
def layer_norm_kernel(
    x_ptr, weight_ptr, bias_ptr, scale_ptr, shift_ptr, y_ptr,
    M, N, tokens, stride_x, stride_scale, stride_shift, eps,
    ROUNDS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    rows = (tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
    cols = tl.arange(0, BLOCK_N)[None, :]
    mask = cols < N
    if BLOCK_M > 1:
        mask &= rows < M
    x = tl.load(x_ptr + rows * stride_x + cols, mask=mask, other=0.0)
    if BLOCK_N > 8192:
        # One round of sums about the mean of the row's first elements: 8192 x 16384 takes 0.136
        # ms, and 0.145 with two rounds.
        near = tl.arange(0, 32)[None, :]
        first = tl.load(x_ptr + rows * stride_x + near, mask=near < N, other=0.0)
        shift = tl.sum(first.to(tl.float32), 1)[:, None] / tl.minimum(N, 32)
        shifted = tl.where(mask, x.to(tl.float32) - shift, 0.0)
        sums, squares = two_row_sums(shifted, shifted * shifted)
        step = sums / N
        mean = shift + step
        variance = tl.maximum(squares / N - step * step, 0.0)
        centred = to_float32_again(x) - mean
    else:
        mean = tl.sum(x.to(tl.float32), 1)[:, None] / N
        centred = tl.where(mask, to_float32_again(x) - mean, 0.0)
        variance = tl.sum(centred * centred, 1)[:, None] / N
    rstd = tl.rsqrt(variance + eps)
    y = affine(centred * rstd, weight_ptr, bias_ptr, cols, N)
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    if scale_ptr is not None:
        modulation = (scale_ptr, shift_ptr, stride_scale, stride_shift)
        y = modulated_row(y, modulation, rows // tokens, cols, mask, dtype, ROUNDS)
    tl.store(y_ptr + rows * N + cols, y.to(dtype), mask=mask)


@triton.jit(do_not_specialize=["M", "samples"])
def layer_norm_backward_kernel(
    dy_ptr, x_ptr, weight_ptr, dx_ptr, dweight_ptr, dbias_ptr,
    M, N, samples, stride_dy, stride_x, eps,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    part, program, programs, first = own_sample(samples, M)
    if samples is not None:
        dy_ptr += first * stride_dy
        x_ptr += first * stride_x
        weight_ptr += part % samples * N
        if dx_ptr is not None:
            dx_ptr += first * N
    cols = tl.arange(0, BLOCK_N)[None, :]
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
    dweight = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    dbias = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in tl.range(program * BLOCK_M, M, programs * BLOCK_M, num_stages=NUM_STAGES):
        rows = (start + tl.arange(0, BLOCK_M))[:, None]
        mask = (rows < M) & (cols < N)
        dy = tl.load(dy_ptr + rows * stride_dy + cols, mask=mask, other=0.0).to(tl.float32)
        if dbias_ptr is not None:
            dbias += dy
        if dx_ptr is not None or dweight_ptr is not None:
            x = tl.load(x_ptr + rows * stride_x + cols, mask=mask, other=0.0).to(tl.float32)
            g = dy
            if weight_ptr is not None:
                g = dy * weight
            mean = tl.sum(x, 1)[:, None] / N
            mean_g = tl.sum(g, 1)[:, None] / N
            centred = tl.where(mask, x - mean, 0.0)
            variance = tl.sum(centred * centred, 1)[:, None] / N
            if BLOCK_M > 1:
                # Rows past M are zeros, which eps = 0 would turn into 0 * inf in dweight.
                variance = tl.where(rows < M, variance, 1.0)
            rstd = tl.rsqrt(variance + eps)
            projection = tl.sum(g * centred, 1)[:, None] / N * rstd
            xhat = centred * rstd
            if dweight_ptr is not None:
                dweight += dy * xhat
            if dx_ptr is not None:
                dx = rstd * (g - mean_g - xhat * projection)
                tl.store(dx_ptr + rows * N + cols, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    if dweight_ptr is not None:
        store_column_sums(dweight_ptr, dweight, part, cols, N)
    if dbias_ptr is not None:
        store_column_sums(dbias_ptr, dbias, part, cols, N)


def launch_whole_rows_backward(plan: WholeRow, norm: NormBackward) -> None:
    stride_dy, _, stride_x = norm.strides
    launch_norm_backward(
        layer_norm_backward_kernel, plan.programs, norm,
        (norm.dy, norm.x, norm.weight), (stride_dy, stride_x, norm.eps),
        BLOCK_M=plan.BLOCK_M, BLOCK_N=plan.BLOCK_N,
        NUM_STAGES=plan.num_stages, num_warps=plan.num_warps,
    )  # fmt: skip


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


def plan_forward(x: Tensor) -> WholeRow | TwoPass:
    """Plan whole rows up to 16384 columns, and two passes beyond.

    Shares of the H200's copy rate in bfloat16, whole rows: 4096 wide 93%; 16384 wide 92%, and 88%
    in two passes. A thread has 64 bytes: 8192 x 6144 in float32 takes 0.102 ms, and 0.104 with 128
    bytes.
    """
    if x.shape[1] <= 16384:
        return plan_whole_rows(x.shape[1], 512, thread_elements=64 // x.element_size())
    return plan_two_pass(x)


def launch_layer_norm(
    call: Any, y: Tensor, plan: Plan | None, modulation: Modulation = PLAIN
) -> None:
    x, weight, bias = rows(call.x), contiguous(call.weight), contiguous(call.bias)
    plan = plan or plan_forward(x)
    tensors = (x, weight, bias, modulation.scale, modulation.shift, y)
    strides = (x.stride(0), *modulation.strides)
    arguments = (*tensors, *x.shape, modulation.tokens, *strides, call.eps)
    if isinstance(plan, WholeRow):
        launch_whole_rows(layer_norm_kernel, plan, x, *arguments, **constants_of(modulation))
    else:
        launch_two_pass(plan, x, *arguments, **constants_of(modulation))


def launch_layer_norm_backward(norm: NormBackward, plan: Plan | None) -> None:
    launch_backward(norm, plan, lambda: plan_with_both_sums(norm.x), launch_whole_rows_backward)


register("cuda", launch_layer_norm, launch_layer_norm_backward, NormBackward, rows)
