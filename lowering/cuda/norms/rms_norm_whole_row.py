"""rms_norm of whole rows: a program reads them once and holds them in registers."""

from __future__ import annotations

import triton
import triton.language as tl

from ...common.triton_math import rms_rstd, rms_scaled, rms_square, to_float32_again
from ..launch import WholeRow
from ..row_sums import store_column_sums, two_row_sums
from .modulation import modulated_row, own_sample
from .norm_backward import NormBackward, launch_norm_backward


@triton.jit
def load_sum(x_ptr, residual_ptr, cols, mask, dtype: tl.constexpr, EVICTION: tl.constexpr):
    """Load a tile of x, and add the residual if there is one: the sum is rounded to `dtype`."""
    x = tl.load(x_ptr + cols, mask=mask, other=0.0, eviction_policy=EVICTION)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + cols, mask=mask, other=0.0, eviction_policy=EVICTION)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(dtype)
    return x


@triton.jit(do_not_specialize=["M", "tokens"])
def rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, scale_ptr, shift_ptr, y_ptr, s_ptr,
    M, N, tokens, stride_x, stride_residual, stride_scale, stride_shift, eps, offset,
    CASTING_MODE: tl.constexpr, ROUNDS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    rows = (tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
    cols = tl.arange(0, BLOCK_N)[None, :]
    mask = (rows < M) & (cols < N)
    x_ptr += rows * stride_x
    if residual_ptr is not None:
        residual_ptr += rows * stride_residual
    x = load_sum(x_ptr, residual_ptr, cols, mask, dtype, "")
    if residual_ptr is not None:
        tl.store(s_ptr + rows * N + cols, x, mask=mask)
    sum_of_squares = tl.sum(rms_square(x.to(tl.float32), dtype, CASTING_MODE), 1)[:, None]
    rstd = rms_rstd(sum_of_squares, N, eps, dtype, CASTING_MODE)
    # The weight is loaded only now: before the sum it would take as many registers as x.
    weight = None
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
    y = rms_scaled(to_float32_again(x), rstd, weight, offset, dtype, CASTING_MODE)
    if scale_ptr is not None:
        modulation = (scale_ptr, shift_ptr, stride_scale, stride_shift)
        y = modulated_row(y, modulation, rows // tokens, cols, mask, dtype, ROUNDS)
    tl.store(y_ptr + rows * N + cols, y.to(dtype), mask=mask)


@triton.jit(do_not_specialize=["M", "samples"])
def rms_norm_backward_kernel(
    dy_ptr, ds_ptr, x_ptr, weight_ptr, dx_ptr, dweight_ptr, dbias_ptr,
    M, N, samples, stride_dy, stride_ds, stride_x, eps, offset,
    KEEPS_WEIGHT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    # KEEPS_WEIGHT: weight stays in registers. A wide row needs those, and loads weight again with
    # every row. A float32 row needs more of them, and loads ds only when its sums are known.
    DS_EARLY: tl.constexpr = x_ptr.dtype.element_ty.primitive_bitwidth < 32
    part, program, programs, first = own_sample(samples, M)
    if samples is not None:
        dy_ptr += first * stride_dy
        x_ptr += first * stride_x
        weight_ptr += part % samples * N
        if dx_ptr is not None:
            dx_ptr += first * N
    cols = tl.arange(0, BLOCK_N)[None, :]
    if weight_ptr is not None and KEEPS_WEIGHT:
        weight = tl.load(weight_ptr + cols, mask=cols < N, other=0.0)
    dweight = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    dbias = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in tl.range(program * BLOCK_M, M, programs * BLOCK_M, num_stages=NUM_STAGES):
        rows = (start + tl.arange(0, BLOCK_M))[:, None]
        mask = (rows < M) & (cols < N)
        x = tl.load(x_ptr + rows * stride_x + cols, mask=mask, other=0.0)
        dy = tl.load(dy_ptr + rows * stride_dy + cols, mask=mask, other=0.0)
        if weight_ptr is not None and not KEEPS_WEIGHT:
            weight = tl.load(weight_ptr + cols, mask=cols < N, other=0.0)
        if ds_ptr is not None and dx_ptr is not None and DS_EARLY:
            ds = tl.load(ds_ptr + rows * stride_ds + cols, mask=mask, other=0.0)
        wide = x.to(tl.float32)
        if dx_ptr is not None:
            # Each branch is the one that keeps a wide row in registers: 8192 x 16384 takes 0.210 ms
            # without ds, and 0.228 by the other branch; with ds 0.264, and 0.330 by the other.
            if ds_ptr is not None:
                g = dy.to(tl.float32)
                if weight_ptr is not None:
                    g *= weight.to(tl.float32) + offset
            else:
                g = to_float32_again(dy)
                if weight_ptr is not None:
                    g *= to_float32_again(weight) + offset
            squares, products = two_row_sums(wide * wide, g * wide)
        else:
            squares = tl.sum(wide * wide, 1)[:, None]
        mean_square = squares / N
        if BLOCK_M > 1:
            # Rows past M are zeros, which eps = 0 would turn into 0 * inf in dweight.
            mean_square = tl.where(rows < M, mean_square, 1.0)
        rstd = tl.rsqrt(mean_square + eps)
        if dx_ptr is not None:
            projection = products / N * rstd
        xhat = to_float32_again(x) * rstd
        g = to_float32_again(dy)
        if dweight_ptr is not None:
            dweight += g * xhat
        if dbias_ptr is not None:
            dbias += g
        if dx_ptr is not None:
            if weight_ptr is not None:
                g *= to_float32_again(weight) + offset
            dx = rstd * (g - xhat * projection)
            if ds_ptr is not None:
                if not DS_EARLY:
                    ds = tl.load(ds_ptr + rows * stride_ds + cols, mask=mask, other=0.0)
                dx += ds.to(tl.float32)
            tl.store(dx_ptr + rows * N + cols, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    if dweight_ptr is not None:
        store_column_sums(dweight_ptr, dweight, part, cols, N)
    if dbias_ptr is not None:
        store_column_sums(dbias_ptr, dbias, part, cols, N)


def launch_whole_rows_backward(plan: WholeRow, norm: NormBackward) -> None:
    launch_norm_backward(
        rms_norm_backward_kernel, plan.programs, norm,
        (norm.dy, norm.ds, norm.x, norm.weight), (*norm.strides, norm.eps, norm.offset),
        KEEPS_WEIGHT=plan.BLOCK_N <= 8192, BLOCK_M=plan.BLOCK_M, BLOCK_N=plan.BLOCK_N,
        NUM_STAGES=plan.num_stages, num_warps=plan.num_warps,
    )  # fmt: skip
