"""rms_norm, with and without a residual added first.

Whole rows: a program reads them once and holds them in registers. Two passes: a program reads its
row twice.
"""

from __future__ import annotations

import math
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ...common.norms.modulation import PLAIN, Modulation
from ...common.norms.norm_math import rms_rstd, rms_scaled, rms_square
from ...common.norms.rms_norm import register, rms_mode
from ...common.tensors import cdiv, contiguous, next_power_of_2
from ...common.triton_math import folded, to_float32_again
from ..launch import (
    Plan,
    Table,
    TwoPass,
    WholeRow,
    launch,
    launch_whole_rows,
    plan_for,
    plan_whole_rows,
    rows,
)
from ..sums import store_column_sums, two_row_sums
from .modulation import constants_of, modulated_row, own_sample
from .norm_backward import NormBackward, launch_norm_backward, plan_whole_rows_backward
from .norm_backward_launch import launch_backward, plan_with_both_sums
from .norm_backward_two_kernel import TwoKernel, plan_two_kernels
from .norm_backward_two_pass import (
    RMS_NORM,
    RMS_NORM_WITH_DS,
    TwoPassBackward,
    plan_two_pass_backward,
)


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


@triton.jit
def _store_tile(
    x, rstd, pointers, place, cols, N, offset,
    CASTING_MODE: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    # The pointers are at the start of the row. .cs (cache streaming): this kernel does not read its
    # output again, and the caches need not keep it.
    weight_ptr, y_ptr, s_ptr = pointers
    modulation, row, tokens = place
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    mask = cols < N
    if s_ptr is not None:
        tl.store(s_ptr + cols, x, mask=mask, cache_modifier=".cs")
    weight = None
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    y = rms_scaled(to_float32_again(x), rstd, weight, offset, dtype, CASTING_MODE)
    if tokens is not None:
        y = modulated_row(y, modulation, row // tokens, cols, mask, dtype, ROUNDS)
    tl.store(y_ptr + cols, y.to(dtype), mask=mask, cache_modifier=".cs")


@triton.jit(do_not_specialize=["M", "tokens"])
def rms_norm_two_pass_kernel(
    x_ptr, residual_ptr, weight_ptr, scale_ptr, shift_ptr, y_ptr, s_ptr,
    M, N, tokens, stride_x, stride_residual, stride_scale, stride_shift, eps, offset,
    CASTING_MODE: tl.constexpr, ROUNDS: tl.constexpr,
    BLOCK_N: tl.constexpr, TILES: tl.constexpr, FOLD: tl.constexpr,
):  # fmt: skip
    # A program has one row. Its last tile stays in registers: 2048 x 65536 takes 0.141 ms on an
    # H200, and 0.151 if the tile is loaded again. The first pass asks the caches to keep the other
    # tiles, and the second, which goes backwards, finds them there. A pipeline through shared
    # memory would only delay both. The compiler unrolls a pass whose number of tiles it knows:
    # 8192 x 16384 takes 0.132 ms, and 0.164 if TILES is not a constant.
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * stride_x
    y_ptr += row * N
    if residual_ptr is not None:
        residual_ptr += row * stride_residual
        s_ptr += row * N
    sums = tl.zeros((BLOCK_N // FOLD,), tl.float32)
    for tile in tl.range(0, TILES - 1, num_stages=1):
        cols = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        x = load_sum(x_ptr, residual_ptr, cols, cols < N, dtype, "evict_last")
        sums += folded(rms_square(x.to(tl.float32), dtype, CASTING_MODE), FOLD)
    cols = (TILES - 1) * BLOCK_N + tl.arange(0, BLOCK_N)
    x = load_sum(x_ptr, residual_ptr, cols, cols < N, dtype, "evict_first")
    sums += folded(rms_square(x.to(tl.float32), dtype, CASTING_MODE), FOLD)
    rstd = rms_rstd(tl.sum(sums, 0), N, eps, dtype, CASTING_MODE)
    pointers = (weight_ptr, y_ptr, s_ptr)
    # A norm without a modulation has no tokens of a sample either.
    modulation = (scale_ptr, shift_ptr, stride_scale, stride_shift)
    place = (modulation, row, tokens)
    _store_tile(x, rstd, pointers, place, cols, N, offset, CASTING_MODE, ROUNDS)
    for stored in tl.range(1, TILES, num_stages=1, loop_unroll_factor=3):
        cols = (TILES - 1 - stored) * BLOCK_N + tl.arange(0, BLOCK_N)
        x = load_sum(x_ptr, residual_ptr, cols, cols < N, dtype, "evict_first")
        _store_tile(x, rstd, pointers, place, cols, N, offset, CASTING_MODE, ROUNDS)


# Shares of the H200's copy rate.
TILES: Table[TwoPass] = {
    # 8192 wide 96%, 12288 95%, 16384 96%, 24576 93%, 32768 95%, 65536 90%.
    2: (
        (8192, TwoPass(2048, 256)),
        (16384, TwoPass(4096, 512)),
        (24576, TwoPass(4096, 1024)),
        (32768, TwoPass(8192, 1024)),
        (math.inf, TwoPass(16384, 1024)),
    ),
    # 8192 wide 97%, 16384 98%, 24576 96%, 32768 93%, 65536 80%.
    4: (
        (24576, TwoPass(4096, 1024)),
        (32768, TwoPass(8192, 1024)),
        (math.inf, TwoPass(16384, 1024)),
    ),
}
# With a residual 8192 x 32768 takes 98%, and in float32 97%, where tiles of 8192 take 82%.
RESIDUAL_TILES: Table[TwoPass] = {
    2: ((32768, TwoPass(8192, 1024)), (math.inf, TwoPass(16384, 1024))),
    4: ((math.inf, TwoPass(16384, 1024)),),
}


def plan_two_pass(x: Tensor, residual: Tensor | None) -> TwoPass:
    return plan_for(x, TILES if residual is None else RESIDUAL_TILES, x.shape[1])


def launch_two_pass(plan: TwoPass, x: Tensor, y: Tensor, *args: Any, **constants: Any) -> None:
    launch(
        rms_norm_two_pass_kernel, (x.shape[0],), x,
        *args,
        **constants, BLOCK_N=plan.BLOCK_N, TILES=cdiv(x.shape[1], plan.BLOCK_N),
        # A thread writes 16 bytes at once.
        FOLD=min(plan.BLOCK_N, 16 // y.element_size()),
        num_warps=plan.num_warps,
    )  # fmt: skip


def plan_forward(x: Tensor, residual: Tensor | None) -> WholeRow | TwoPass:
    """Plan whole rows below 8192 columns, or with a residual up to 16384, and two passes beyond.

    Shares of the H200's copy rate in bfloat16, whole rows: 1024 wide 86%, 4096 97%, 5120 81%,
    7168 90%; 8192 92%, and more in two passes. With a residual whole rows of 16384 take 95%.
    """
    N = x.shape[1]
    if N < 8192 or (residual is not None and N <= 16384):
        return plan_whole_rows(N, most_threads=256 if N <= 8192 else 512)
    return plan_two_pass(x, residual)


def plan_backward(
    x: Tensor, ds: Tensor | None, has_sums: bool = False
) -> WholeRow | TwoPassBackward | TwoKernel:
    """Plan whole rows if a row fits in 32 KiB: 8192 rows of 16384 take 0.210 ms in bfloat16. In
    float32 such a row does not fit: 0.490 ms whole, and 0.391 in two passes.

    `has_sums`: a modulated norm also needs the sums of dy. A program then has as few registers left
    as in layer_norm.
    """
    if has_sums:
        return plan_with_both_sums(x)
    if next_power_of_2(x.shape[1]) * x.element_size() <= 32768:
        return plan_whole_rows_backward(x, 2 if ds is None else 3)
    table = RMS_NORM if ds is None else RMS_NORM_WITH_DS
    return plan_two_pass_backward(x, table) or plan_two_kernels(x)


def launch_rms_norm(
    call: Any, residual: Tensor | None, y: Tensor, s: Tensor | None, plan: Plan | None,
    modulation: Modulation = PLAIN,
) -> None:  # fmt: skip
    x, weight = rows(call.x), contiguous(call.weight)
    residual = None if residual is None else rows(residual)
    plan = plan or plan_forward(x, residual)
    strides = (x.stride(0), 0 if residual is None else residual.stride(0), *modulation.strides)
    tensors = (x, residual, weight, modulation.scale, modulation.shift, y, s)
    arguments = (*tensors, *x.shape, modulation.tokens, *strides, call.eps, call.offset)
    constants = {"CASTING_MODE": rms_mode(call.casting_mode), **constants_of(modulation)}
    if isinstance(plan, WholeRow):
        launch_whole_rows(rms_norm_kernel, plan, x, *arguments, **constants)
    else:
        launch_two_pass(plan, x, y, *arguments, **constants)


def launch_rms_norm_backward(norm: NormBackward, plan: Plan | None) -> None:
    def planned() -> Plan:
        return plan_backward(norm.x, norm.ds, norm.dbias is not None)

    launch_backward(norm, plan, planned, launch_whole_rows_backward)


register("cuda", launch_rms_norm, launch_rms_norm_backward, NormBackward, rows)
