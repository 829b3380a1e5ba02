"""The backward of rms_norm and layer_norm, where a program reads each row twice.

A row and the sums of its columns, which become the gradients of weight and bias, do not fit in a
program's registers together. The sums stay there, and the row is read again from the caches.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import triton
import triton.language as tl
from torch import Tensor

from ...common.tensors import cdiv, next_power_of_2
from ...common.triton_math import folded, to_float32_again
from ..launch import Plan, Table, on_nvidia, plan_for, processors
from ..sums import four_totals, mean_and_rstd, near_mean, two_totals
from .modulation import own_sample
from .norm_backward import NormBackward, launch_norm_backward


@triton.jit
def _prefetch_row(row_ptr, N, ROW: tl.constexpr):
    """Prefetch a row of N elements to the L2 cache, on NVIDIA's GPUs only. ROW is the least power
    of 2 that is at least N. Triton has no function for it."""
    # 64 bytes an instruction. Addresses behind the row become its last element's. The asm returns
    # 0, which is not used: is_pure=False keeps the compiler from removing it.
    STEP: tl.constexpr = 512 // row_ptr.dtype.element_ty.primitive_bitwidth
    at = tl.minimum(tl.arange(0, ROW // STEP) * STEP, N - 1)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [row_ptr + at],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit(do_not_specialize=["M", "samples"])
def two_pass_backward_kernel(
    dy_ptr, ds_ptr, x_ptr, weight_ptr, dx_ptr, dweight_ptr, dbias_ptr,
    M, N, samples, stride_dy, stride_ds, stride_x, eps, offset,
    HAS_MEAN: tl.constexpr, BLOCK_N: tl.constexpr, TILES: tl.constexpr,
    ROW: tl.constexpr, FOLD: tl.constexpr, PREFETCH: tl.constexpr,
):  # fmt: skip
    # The first pass asks the L1 cache to keep the row. The second goes backwards and finds the last
    # tile in registers: layer_norm of 8192 x 16384 takes 0.235 ms on an H200, and 0.241 if the tile
    # is loaded again. Between the passes the program prefetches its next row: without that, 0.287.
    part, program, programs, first = own_sample(samples, M)
    if samples is not None:
        dy_ptr += first * stride_dy
        x_ptr += first * stride_x
        weight_ptr += part % samples * N
        if dx_ptr is not None:
            dx_ptr += first * N
    lanes = tl.arange(0, BLOCK_N)
    dweight = ()
    dbias = ()
    for _ in tl.static_range(TILES):
        if dweight_ptr is not None:
            dweight = dweight + (tl.zeros((BLOCK_N,), tl.float32),)
        if dbias_ptr is not None:
            dbias = dbias + (tl.zeros((BLOCK_N,), tl.float32),)
    for row in tl.range(program, M, programs, num_stages=1):
        x_row = x_ptr + row * stride_x
        dy_row = dy_ptr + row * stride_dy
        near = near_mean(x_row, N) if HAS_MEAN else 0.0
        shift = near.to(tl.float32) if HAS_MEAN else 0.0
        sums = tl.zeros((BLOCK_N // FOLD,), tl.float32)
        squares = tl.zeros((BLOCK_N // FOLD,), tl.float32)
        sums_g = tl.zeros((BLOCK_N // FOLD,), tl.float32)
        products = tl.zeros((BLOCK_N // FOLD,), tl.float32)
        for tile in tl.static_range(TILES):
            cols = tile * BLOCK_N + lanes
            # Masked elements are `near`, and 0 once the shift is subtracted.
            x = tl.load(x_row + cols, mask=cols < N, other=near, eviction_policy="evict_last")
            dy = tl.load(dy_row + cols, mask=cols < N, other=0.0, eviction_policy="evict_last")
            wide = x.to(tl.float32) - shift
            g = dy.to(tl.float32)
            if weight_ptr is not None:
                weight = tl.load(
                    weight_ptr + cols, mask=cols < N, other=0.0, eviction_policy="evict_last"
                )
                g *= weight.to(tl.float32) + offset
            squares += folded(wide * wide, FOLD)
            products += folded(g * wide, FOLD)
            if HAS_MEAN:
                sums += folded(wide, FOLD)
                sums_g += folded(g, FOLD)
        if PREFETCH:
            ahead = tl.minimum(row + programs, M - 1)
            _prefetch_row(x_ptr + ahead * stride_x, N, ROW)
            _prefetch_row(dy_ptr + ahead * stride_dy, N, ROW)
        if HAS_MEAN:
            sum, square, sum_g, product = four_totals(sums, squares, sums_g, products)
            mean, rstd, step = mean_and_rstd(sum, square, shift, N, eps)
            mean_g = sum_g / N
            projection = (product / N - step * mean_g) * rstd
            # xhat = x * rstd + centre
            centre = -mean * rstd
        else:
            square, product = two_totals(squares, products)
            rstd = tl.rsqrt(square / N + eps)
            projection = product / N * rstd
        # dx = g * rstd + xhat * slope - mean_g * rstd
        slope = -projection * rstd
        # The tuples are built anew in each turn, from the last tile to the first.
        dweight_so_far, dbias_so_far = dweight, dbias
        dweight = ()
        dbias = ()
        for done in tl.static_range(TILES):
            cols = (TILES - 1 - done) * BLOCK_N + lanes
            # The first pass has left its last tile in x, dy and weight.
            if done > 0:
                x = tl.load(x_row + cols, mask=cols < N, other=0.0)
                dy = tl.load(dy_row + cols, mask=cols < N, other=0.0)
                if weight_ptr is not None:
                    weight = tl.load(weight_ptr + cols, mask=cols < N, other=0.0)
            xhat = to_float32_again(x) * rstd
            if HAS_MEAN:
                xhat += centre
            g = to_float32_again(dy)
            if dweight_ptr is not None:
                dweight = (dweight_so_far[TILES - 1 - done] + g * xhat,) + dweight
            if dbias_ptr is not None:
                dbias = (dbias_so_far[TILES - 1 - done] + g,) + dbias
            if dx_ptr is not None:
                if weight_ptr is not None:
                    g *= to_float32_again(weight) + offset
                rest = xhat * slope
                if HAS_MEAN:
                    rest -= mean_g * rstd
                dx = g * rstd + rest
                if ds_ptr is not None:
                    ds = tl.load(ds_ptr + row * stride_ds + cols, mask=cols < N, other=0.0)
                    dx += ds.to(tl.float32)
                tl.store(
                    dx_ptr + row * N + cols,
                    dx.to(dx_ptr.dtype.element_ty),
                    mask=cols < N,
                    cache_modifier=".cs",
                )
    for tile in tl.static_range(TILES):
        cols = tile * BLOCK_N + lanes
        if dweight_ptr is not None:
            tl.store(dweight_ptr + part * N + cols, dweight[tile], mask=cols < N)
        if dbias_ptr is not None:
            tl.store(dbias_ptr + part * N + cols, dbias[tile], mask=cols < N)


@dataclass(frozen=True)
class TwoPassBackward(Plan):
    """`programs` persistent programs; with `prefetch` each brings its next row to the L2 cache."""

    programs: int = 1
    prefetch: bool = False


# Tables by the largest width of a row. The figures are ms on an H200: of this kernel, and of the
# two kernels for wider rows.
RMS_NORM: Table[TwoPassBackward] = {
    # 4096 rows of 20480 0.150 and 0.209, of 24576 0.191 and 0.248, of 32768 0.242 and 0.326.
    2: (
        (20480, TwoPassBackward(4096, 512, prefetch=True)),
        (32768, TwoPassBackward(8192, 512)),
    ),
    # 8192 rows of 12288 0.312 and 0.476, of 16384 0.391 and 0.631, 4096 of 24576 0.356 and 0.479,
    # of 28672 0.486 and 0.561, but of 32768 0.903 and 0.712.
    4: (
        (12288, TwoPassBackward(4096, 256, prefetch=True)),
        (24576, TwoPassBackward(8192, 256)),
        (28672, TwoPassBackward(4096, 256)),
    ),
}
RMS_NORM_WITH_DS: Table[TwoPassBackward] = {
    # 4096 rows of 20480 0.209 and 0.249, of 28672 0.325 and 0.343, but of 32768 0.538 and 0.388.
    2: (
        (20480, TwoPassBackward(4096, 512)),
        (24576, TwoPassBackward(8192, 512)),
        (28672, TwoPassBackward(4096, 512)),
    ),
    # 8192 rows of 16384 0.522 and 0.752, 4096 of 20480 0.385 and 0.481, of 24576 0.480 and 0.569.
    4: (
        (16384, TwoPassBackward(8192, 256)),
        (20480, TwoPassBackward(4096, 256)),
        (24576, TwoPassBackward(8192, 256)),
    ),
}
LAYER_NORM: Table[TwoPassBackward] = {
    # 8192 rows of 10240 0.174 and 0.211, of 12288 0.185 and 0.248, of 16384 0.234 and 0.326.
    2: ((16384, TwoPassBackward(4096, 512, prefetch=True)),),
    # 8192 rows of 10240 0.254 and 0.399, of 12288 0.314 and 0.476, of 16384 0.499 and 0.634.
    4: (
        (12288, TwoPassBackward(2048, 256, prefetch=True)),
        (16384, TwoPassBackward(2048, 256)),
    ),
}


def plan_two_pass_backward(x: Tensor, table: Table[TwoPassBackward]) -> TwoPassBackward | None:
    """Return the table's plan for rows as wide as x's, or None if they are too wide for it."""
    plan = plan_for(x, table, x.shape[1])
    if plan is None:
        return None
    # No more programs than multiprocessors, and as many as have the same number of rows: they end
    # together.
    return replace(plan, programs=cdiv(x.shape[0], cdiv(x.shape[0], processors(x))))


def launch_two_pass_backward(plan: TwoPassBackward, norm: NormBackward) -> None:
    N = norm.x.shape[1]
    launch_norm_backward(
        two_pass_backward_kernel, plan.programs, norm,
        (norm.dy, norm.ds, norm.x, norm.weight), (*norm.strides, norm.eps, norm.offset),
        HAS_MEAN=norm.has_mean,
        BLOCK_N=plan.BLOCK_N, TILES=cdiv(N, plan.BLOCK_N), ROW=next_power_of_2(N),
        # A thread loads 16 bytes at once.
        FOLD=min(plan.BLOCK_N, 16 // norm.x.element_size()),
        PREFETCH=on_nvidia(norm.x) and plan.prefetch, num_warps=plan.num_warps,
    )  # fmt: skip
