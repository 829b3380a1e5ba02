"""The Triton kernels of rms_norm, with and without a residual added first."""

from __future__ import annotations

import triton
import triton.language as tl

from ..triton_math import folded, rms_rstd, rms_scaled, rms_square, widened_again
from .row_sums import two_row_sums


@triton.jit
def _load(
    x_ptr,
    residual_ptr,
    cols,
    mask,
    dtype: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    EVICTION: tl.constexpr,
):
    x = tl.load(x_ptr + cols, mask=mask, other=0.0, eviction_policy=EVICTION)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + cols, mask=mask, other=0.0, eviction_policy=EVICTION)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(dtype)
    return x


@triton.jit(do_not_specialize=["M"])
def rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    y_ptr,
    s_ptr,
    M,
    N,
    stride_x,
    stride_residual,
    eps,
    offset,
    CASTING_MODE: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    rows = (tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
    cols = tl.arange(0, BLOCK_N)[None, :]
    mask = (rows < M) & (cols < N)
    x_ptr += rows * stride_x
    if HAS_RESIDUAL:
        residual_ptr += rows * stride_residual
    x = _load(x_ptr, residual_ptr, cols, mask, dtype, HAS_RESIDUAL, "")
    if HAS_RESIDUAL:
        tl.store(s_ptr + rows * N + cols, x, mask=mask)
    sum_of_squares = tl.sum(rms_square(x.to(tl.float32), dtype, CASTING_MODE), 1)[:, None]
    rstd = rms_rstd(sum_of_squares, N, eps, dtype, CASTING_MODE)
    # Loaded only now: before the sum it would take as many registers as x.
    weight = None
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
    y = rms_scaled(widened_again(x), rstd, weight, offset, dtype, CASTING_MODE, HAS_WEIGHT)
    tl.store(y_ptr + rows * N + cols, y.to(dtype), mask=mask)


@triton.jit
def _store_tile(
    x,
    rstd,
    pointers,
    cols,
    N,
    offset,
    CASTING_MODE: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
):
    # Of one row, where pointers begin. Nobody reads it again, hence .cs.
    weight_ptr, y_ptr, s_ptr = pointers
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    mask = cols < N
    if HAS_RESIDUAL:
        tl.store(s_ptr + cols, x, mask=mask, cache_modifier=".cs")
    weight = None
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    y = rms_scaled(widened_again(x), rstd, weight, offset, dtype, CASTING_MODE, HAS_WEIGHT)
    tl.store(y_ptr + cols, y.to(dtype), mask=mask, cache_modifier=".cs")


@triton.jit(do_not_specialize=["M"])
def rms_norm_wide_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    y_ptr,
    s_ptr,
    M,
    N,
    stride_x,
    stride_residual,
    eps,
    offset,
    CASTING_MODE: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TILES: tl.constexpr,
    FOLD: tl.constexpr,
):
    # A row a program, in tiles. The last stays in registers: 2048 x 65536 takes 0.141 ms on an
    # H200, 0.151 where it is loaded again. The second walk, backwards, finds the others in the
    # caches, for the first asks them to keep those. A pipeline through shared memory would only
    # delay both. Walks of a number of tiles that the compiler knows are unrolled: 8192 x 16384
    # takes 0.132 ms, and 0.164 where it does not know it.
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * stride_x
    y_ptr += row * N
    if HAS_RESIDUAL:
        residual_ptr += row * stride_residual
        s_ptr += row * N
    sums = tl.zeros((BLOCK_N // FOLD,), tl.float32)
    for tile in tl.range(0, TILES - 1, num_stages=1):
        cols = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        x = _load(x_ptr, residual_ptr, cols, cols < N, dtype, HAS_RESIDUAL, "evict_last")
        sums += folded(rms_square(x.to(tl.float32), dtype, CASTING_MODE), FOLD)
    cols = (TILES - 1) * BLOCK_N + tl.arange(0, BLOCK_N)
    x = _load(x_ptr, residual_ptr, cols, cols < N, dtype, HAS_RESIDUAL, "evict_first")
    sums += folded(rms_square(x.to(tl.float32), dtype, CASTING_MODE), FOLD)
    rstd = rms_rstd(tl.sum(sums, 0), N, eps, dtype, CASTING_MODE)
    pointers = (weight_ptr, y_ptr, s_ptr)
    _store_tile(x, rstd, pointers, cols, N, offset, CASTING_MODE, HAS_RESIDUAL, HAS_WEIGHT)
    for stored in tl.range(1, TILES, num_stages=1, loop_unroll_factor=3):
        cols = (TILES - 1 - stored) * BLOCK_N + tl.arange(0, BLOCK_N)
        x = _load(x_ptr, residual_ptr, cols, cols < N, dtype, HAS_RESIDUAL, "evict_first")
        _store_tile(x, rstd, pointers, cols, N, offset, CASTING_MODE, HAS_RESIDUAL, HAS_WEIGHT)


@triton.jit(do_not_specialize=["M"])
def rms_norm_backward_kernel(
    dy_ptr,
    ds_ptr,
    x_ptr,
    weight_ptr,
    dx_ptr,
    dweight_ptr,
    M,
    N,
    stride_dy,
    stride_ds,
    stride_x,
    eps,
    offset,
    HAS_DS: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    NEEDS_DX: tl.constexpr,
    NEEDS_DWEIGHT: tl.constexpr,
    KEEPS_WEIGHT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    # KEEPS_WEIGHT: in registers. A wide row needs them, and loads weight again with every row. A
    # float32 row needs them more, and ds is loaded only once its sums are known.
    DS_EARLY: tl.constexpr = x_ptr.dtype.element_ty.primitive_bitwidth < 32
    program = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK_N)[None, :]
    if HAS_WEIGHT and KEEPS_WEIGHT:
        weight = tl.load(weight_ptr + cols, mask=cols < N, other=0.0)
    dweight = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in tl.range(program * BLOCK_M, M, tl.num_programs(0) * BLOCK_M, num_stages=STAGES):
        rows = (start + tl.arange(0, BLOCK_M))[:, None]
        mask = (rows < M) & (cols < N)
        x = tl.load(x_ptr + rows * stride_x + cols, mask=mask, other=0.0)
        dy = tl.load(dy_ptr + rows * stride_dy + cols, mask=mask, other=0.0)
        if HAS_WEIGHT and not KEEPS_WEIGHT:
            weight = tl.load(weight_ptr + cols, mask=cols < N, other=0.0)
        if HAS_DS and NEEDS_DX and DS_EARLY:
            ds = tl.load(ds_ptr + rows * stride_ds + cols, mask=mask, other=0.0)
        wide = x.to(tl.float32)
        if NEEDS_DX:
            # The road by which a wide row stays in registers: 8192 x 16384 takes 0.210 ms by this
            # and 0.228 by the other without ds, 0.264 and 0.330 with it.
            if HAS_DS:
                g = dy.to(tl.float32)
                if HAS_WEIGHT:
                    g *= weight.to(tl.float32) + offset
            else:
                g = widened_again(dy)
                if HAS_WEIGHT:
                    g *= widened_again(weight) + offset
            squares, products = two_row_sums(wide * wide, g * wide)
        else:
            squares = tl.sum(wide * wide, 1)[:, None]
        mean_square = squares / N
        if BLOCK_M > 1:
            # Rows past M are zeros, of which eps = 0 would make 0 * inf in dweight.
            mean_square = tl.where(rows < M, mean_square, 1.0)
        rstd = tl.rsqrt(mean_square + eps)
        if NEEDS_DX:
            projection = products / N * rstd
        xhat = widened_again(x) * rstd
        g = widened_again(dy)
        if NEEDS_DWEIGHT:
            dweight += g * xhat
        if NEEDS_DX:
            if HAS_WEIGHT:
                g *= widened_again(weight) + offset
            dx = rstd * (g - xhat * projection)
            if HAS_DS:
                if not DS_EARLY:
                    ds = tl.load(ds_ptr + rows * stride_ds + cols, mask=mask, other=0.0)
                dx += ds.to(tl.float32)
            tl.store(dx_ptr + rows * N + cols, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    if NEEDS_DWEIGHT:
        sums = tl.sum(dweight, 0)[None, :]
        tl.store(dweight_ptr + program * N + cols, sums, mask=cols < N)


@triton.jit(do_not_specialize=["M"])
def rms_norm_statistics_kernel(
    dy_ptr,
    x_ptr,
    weight_ptr,
    rstd_ptr,
    projection_ptr,
    M,
    N,
    stride_dy,
    stride_x,
    eps,
    offset,
    HAS_WEIGHT: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    # For each wide row: rstd, and mean(g * xhat), the projection of g on xhat.
    row = tl.program_id(0).to(tl.int64)
    squares = tl.zeros((BLOCK_N,), tl.float32)
    products = tl.zeros((BLOCK_N,), tl.float32)
    for start in range(0, N, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        mask = cols < N
        x = tl.load(x_ptr + row * stride_x + cols, mask=mask, other=0.0).to(tl.float32)
        g = tl.load(dy_ptr + row * stride_dy + cols, mask=mask, other=0.0).to(tl.float32)
        if HAS_WEIGHT:
            g *= tl.load(weight_ptr + cols, mask=mask, other=0.0).to(tl.float32) + offset
        squares += x * x
        products += g * x
    rstd = tl.rsqrt(tl.sum(squares, 0) / N + eps)
    tl.store(rstd_ptr + row, rstd)
    tl.store(projection_ptr + row, tl.sum(products, 0) * rstd / N)
