"""poly_norm. M rows, N columns.

In two passes a program reads its row twice: first for the row's sums, then from the caches to write
the result.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from .... import library
from ...common.norms.poly_norm_math import (
    even_powers,
    poly_gradient,
    poly_result,
    slope_factor,
    weights_of,
)
from ...common.tensors import contiguous
from ...common.triton_math import folded
from ..launch import (
    Plan,
    TwoPass,
    WholeRow,
    launch,
    launch_whole_rows,
    plan_whole_rows,
    processors,
    rows,
)
from ..sums import four_totals, partial_sums, summed, two_row_sums, two_totals
from .norm_backward import plan_whole_rows_backward


@triton.jit
def _tile(row_ptr, cols, N, policy: tl.constexpr):
    return tl.load(row_ptr + cols, mask=cols < N, other=0.0, eviction_policy=policy).to(tl.float32)


@triton.jit(do_not_specialize=["M"])
def poly_norm_two_pass_kernel(
    x_ptr, weight_ptr, bias_ptr, y_ptr, M, N, stride_x, eps,
    BLOCK_N: tl.constexpr, FOLD: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * stride_x
    weight_3, weight_2, weight_1, bias = weights_of(weight_ptr, bias_ptr)
    sums_2 = tl.zeros((BLOCK_N // FOLD,), tl.float32)
    sums_4 = tl.zeros((BLOCK_N // FOLD,), tl.float32)
    sums_6 = tl.zeros((BLOCK_N // FOLD,), tl.float32)
    for start in tl.range(0, N, BLOCK_N, num_stages=1):
        x = _tile(x_ptr, start + tl.arange(0, BLOCK_N), N, "evict_last")
        square, fourth, sixth = even_powers(x)
        sums_2 += folded(square, FOLD)
        sums_4 += folded(fourth, FOLD)
        sums_6 += folded(sixth, FOLD)
    sum_2, sum_4 = two_totals(sums_2, sums_4)
    scale_3 = weight_3 * tl.rsqrt(tl.sum(sums_6, 0) / N + eps)
    scale_2 = weight_2 * tl.rsqrt(sum_4 / N + eps)
    scale_1 = weight_1 * tl.rsqrt(sum_2 / N + eps)
    # The last tile comes first: it is in the nearest cache.
    for tile in tl.range(1, tl.cdiv(N, BLOCK_N) + 1, num_stages=1):
        cols = (tl.cdiv(N, BLOCK_N) - tile) * BLOCK_N + tl.arange(0, BLOCK_N)
        x = _tile(x_ptr, cols, N, "evict_first")
        y = poly_result(x, scale_3, scale_2, scale_1, bias)
        tl.store(y_ptr + row * N + cols, y.to(y_ptr.dtype.element_ty), mask=cols < N)


@triton.jit(do_not_specialize=["M"])
def poly_norm_two_pass_backward_kernel(
    dy_ptr, x_ptr, weight_ptr, dx_ptr, dweight_ptr, dbias_ptr, M, N, stride_dy, stride_x, eps,
    BLOCK_N: tl.constexpr, FOLD: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    weight_3, weight_2, weight_1, _ = weights_of(weight_ptr, None)
    dweight_3 = 0.0
    dweight_2 = 0.0
    dweight_1 = 0.0
    dbias = 0.0
    for row in tl.range(program, M, tl.num_programs(0), num_stages=1):
        x_row = x_ptr + row * stride_x
        dy_row = dy_ptr + row * stride_dy
        sums_2 = tl.zeros((BLOCK_N // FOLD,), tl.float32)
        sums_4 = tl.zeros((BLOCK_N // FOLD,), tl.float32)
        sums_6 = tl.zeros((BLOCK_N // FOLD,), tl.float32)
        products_1 = tl.zeros((BLOCK_N // FOLD,), tl.float32)
        products_2 = tl.zeros((BLOCK_N // FOLD,), tl.float32)
        products_3 = tl.zeros((BLOCK_N // FOLD,), tl.float32)
        sums_dy = tl.zeros((BLOCK_N // FOLD,), tl.float32)
        for start in tl.range(0, N, BLOCK_N, num_stages=1):
            cols = start + tl.arange(0, BLOCK_N)
            x = _tile(x_row, cols, N, "evict_last")
            dy = _tile(dy_row, cols, N, "evict_last")
            square, fourth, sixth = even_powers(x)
            sums_2 += folded(square, FOLD)
            sums_4 += folded(fourth, FOLD)
            sums_6 += folded(sixth, FOLD)
            products_1 += folded(dy * x, FOLD)
            products_2 += folded(dy * square, FOLD)
            products_3 += folded(dy * square * x, FOLD)
            if dbias_ptr is not None:
                sums_dy += folded(dy, FOLD)
        sum_2, sum_4, sum_6, sum_dy = four_totals(sums_2, sums_4, sums_6, sums_dy)
        product_2, product_3 = two_totals(products_2, products_3)
        product_1 = tl.sum(products_1, 0)
        rstd_3 = tl.rsqrt(sum_6 / N + eps)
        rstd_2 = tl.rsqrt(sum_4 / N + eps)
        rstd_1 = tl.rsqrt(sum_2 / N + eps)
        dweight_3 += rstd_3 * product_3
        dweight_2 += rstd_2 * product_2
        dweight_1 += rstd_1 * product_1
        dbias += sum_dy
        if dx_ptr is not None:
            slope_3 = slope_factor(weight_3, rstd_3, product_3, N)
            slope_2 = slope_factor(weight_2, rstd_2, product_2, N)
            slope_1 = slope_factor(weight_1, rstd_1, product_1, N)
            for tile in tl.range(1, tl.cdiv(N, BLOCK_N) + 1, num_stages=1):
                cols = (tl.cdiv(N, BLOCK_N) - tile) * BLOCK_N + tl.arange(0, BLOCK_N)
                dx = poly_gradient(
                    _tile(dy_row, cols, N, "evict_first"), _tile(x_row, cols, N, "evict_first"),
                    weight_3 * rstd_3, weight_2 * rstd_2, weight_1 * rstd_1,
                    slope_3, slope_2, slope_1,
                )  # fmt: skip
                tl.store(dx_ptr + row * N + cols, dx.to(dx_ptr.dtype.element_ty), mask=cols < N)
    if dweight_ptr is not None:
        tl.store(dweight_ptr + program * 3, dweight_3)
        tl.store(dweight_ptr + program * 3 + 1, dweight_2)
        tl.store(dweight_ptr + program * 3 + 2, dweight_1)
    if dbias_ptr is not None:
        tl.store(dbias_ptr + program, dbias)


@triton.jit(do_not_specialize=["M"])
def poly_norm_kernel(
    x_ptr, weight_ptr, bias_ptr, y_ptr, M, N, stride_x, eps,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    rows = (tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
    cols = tl.arange(0, BLOCK_N)[None, :]
    mask = (rows < M) & (cols < N)
    weight_3, weight_2, weight_1, bias = weights_of(weight_ptr, bias_ptr)
    x = tl.load(x_ptr + rows * stride_x + cols, mask=mask, other=0.0).to(tl.float32)
    square, fourth, sixth = even_powers(x)
    sum_2, sum_4 = two_row_sums(square, fourth)
    sum_6 = tl.sum(sixth, 1)[:, None]
    scale_3 = weight_3 * tl.rsqrt(sum_6 / N + eps)
    scale_2 = weight_2 * tl.rsqrt(sum_4 / N + eps)
    scale_1 = weight_1 * tl.rsqrt(sum_2 / N + eps)
    y = poly_result(x, scale_3, scale_2, scale_1, bias)
    tl.store(y_ptr + rows * N + cols, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["M"])
def poly_norm_backward_kernel(
    dy_ptr, x_ptr, weight_ptr, dx_ptr, dweight_ptr, dbias_ptr, M, N, stride_dy, stride_x, eps,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK_N)[None, :]
    weight_3, weight_2, weight_1, _ = weights_of(weight_ptr, None)
    dweight_3 = tl.zeros((BLOCK_M, 1), tl.float32)
    dweight_2 = tl.zeros((BLOCK_M, 1), tl.float32)
    dweight_1 = tl.zeros((BLOCK_M, 1), tl.float32)
    dbias = tl.zeros((BLOCK_M, 1), tl.float32)
    for start in tl.range(
        program * BLOCK_M, M, tl.num_programs(0) * BLOCK_M, num_stages=NUM_STAGES
    ):
        rows = (start + tl.arange(0, BLOCK_M))[:, None]
        mask = (rows < M) & (cols < N)
        dy = tl.load(dy_ptr + rows * stride_dy + cols, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + rows * stride_x + cols, mask=mask, other=0.0).to(tl.float32)
        square, fourth, sixth = even_powers(x)
        sum_2, sum_4 = two_row_sums(square, fourth)
        sum_6, product_1 = two_row_sums(sixth, dy * x)
        product_2, product_3 = two_row_sums(dy * square, dy * square * x)
        if BLOCK_M > 1:
            # Rows past M are zeros, which eps = 0 would turn into 0 * inf in dweight.
            sum_6 = tl.where(rows < M, sum_6, 1.0)
            sum_4 = tl.where(rows < M, sum_4, 1.0)
            sum_2 = tl.where(rows < M, sum_2, 1.0)
        rstd_3 = tl.rsqrt(sum_6 / N + eps)
        rstd_2 = tl.rsqrt(sum_4 / N + eps)
        rstd_1 = tl.rsqrt(sum_2 / N + eps)
        if dx_ptr is not None:
            dx = poly_gradient(
                dy, x, weight_3 * rstd_3, weight_2 * rstd_2, weight_1 * rstd_1,
                slope_factor(weight_3, rstd_3, product_3, N),
                slope_factor(weight_2, rstd_2, product_2, N),
                slope_factor(weight_1, rstd_1, product_1, N),
            )  # fmt: skip
            tl.store(dx_ptr + rows * N + cols, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        if dweight_ptr is not None:
            dweight_3 += rstd_3 * product_3
            dweight_2 += rstd_2 * product_2
            dweight_1 += rstd_1 * product_1
        if dbias_ptr is not None:
            dbias += tl.sum(dy, 1)[:, None]
    if dweight_ptr is not None:
        tl.store(dweight_ptr + program * 3, tl.sum(tl.sum(dweight_3, 1), 0))
        tl.store(dweight_ptr + program * 3 + 1, tl.sum(tl.sum(dweight_2, 1), 0))
        tl.store(dweight_ptr + program * 3 + 2, tl.sum(tl.sum(dweight_1, 1), 0))
    if dbias_ptr is not None:
        tl.store(dbias_ptr + program, tl.sum(tl.sum(dbias, 1), 0))


# The plans are those of layer_norm, which reads and writes as much.
def plan_forward(x: Tensor) -> WholeRow | TwoPass:
    if x.shape[1] <= 16384:
        return plan_whole_rows(x.shape[1], 512, thread_elements=64 // x.element_size())
    return TwoPass(8192, 512)


def plan_backward(x: Tensor) -> WholeRow | TwoPass:
    if x.shape[1] <= 8192:
        return plan_whole_rows_backward(x, loads=2)
    return TwoPass(4096, 512)


@library.kernel("poly_norm", "cuda")
def poly_norm(call: Any, y: Tensor, plan: Plan | None) -> None:
    x, weight = rows(call.x), contiguous(call.weight)
    plan = plan or plan_forward(x)
    arguments = (x, weight, call.bias, y, *x.shape, x.stride(0), call.eps)
    if isinstance(plan, WholeRow):
        launch_whole_rows(poly_norm_kernel, plan, x, *arguments)
    else:
        sizes = {"BLOCK_N": plan.BLOCK_N, "num_warps": plan.num_warps}
        launch(poly_norm_two_pass_kernel, (x.shape[0],), x, *arguments, **sizes, FOLD=_fold(plan))


@library.kernel("poly_norm_backward", "cuda")
def poly_norm_backward(
    call: Any, dx: Tensor | None, dweight: Tensor | None, dbias: Tensor | None, plan: Plan | None
) -> None:
    dy, x, weight = rows(call.dy), rows(call.x), contiguous(call.weight)
    plan = plan or plan_backward(x)
    if isinstance(plan, WholeRow):
        kernel, programs = poly_norm_backward_kernel, plan.programs
        options = {"BLOCK_M": plan.BLOCK_M, "NUM_STAGES": plan.num_stages}
    else:
        kernel, programs = poly_norm_two_pass_backward_kernel, min(x.shape[0], 2 * processors(x))
        options = {"FOLD": _fold(plan)}
    dweights, dbiases = partial_sums(dweight, programs), partial_sums(dbias, programs)
    launch(
        kernel, (programs,), x,
        dy, x, weight, dx, dweights, dbiases,
        *x.shape, dy.stride(0), x.stride(0), call.eps,
        BLOCK_N=plan.BLOCK_N, num_warps=plan.num_warps, **options,
    )  # fmt: skip
    summed((dweights, dweight))
    summed((dbiases, dbias))


def _fold(plan: Plan) -> int:
    """Return how many neighbours a thread sums into one accumulator."""
    return min(8, plan.BLOCK_N)
