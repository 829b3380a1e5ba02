"""poly_norm. M rows, N columns."""

from __future__ import annotations

from typing import Any

import torch
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
from .. import tiling
from ..partial_sums import summed
from ..tile import load, remaining, tile_offsets
from ..tiling import COSTS, Cost, Kept, Plan, launch_rows
from .resident_rows import kept_row, piece

# whole (1, 4096): 71.1% | 71.0%, (2, 1024): 36.1%. wide (1, 2048): 56.6%.
# kept 8192 in pieces of 2048: 64.9%, 16384 of 2048: 81.6%, fp32 8192 of 2048: 85.6%.
COSTS["poly_norm"] = Cost(
    {2: 35.6, 4: 35.6}, {2: 54.4, 4: 54.4}, kept=(Kept({2: 4.1, 4: 8.1}, {2: 46.1, 4: 50.1}),)
)
# whole (1, 1024): 32.7% | 32.6%, (2, 512): 33.5%. wide (1, 2048): 81.9%.
# kept 4096 in pieces of 2048: 81.9%, 8192 of 1024: 66.3%, fp32 4096 of 1024: 71.4%.
COSTS["poly_norm_backward"] = Cost(
    {2: 64.5, 4: 64.5}, {2: 78.8, 4: 78.8}, kept=(Kept({2: 8.1, 4: 18.2}, {2: 62.6, 4: 65.0}),)
)


@triton.jit
def _sum(x):
    return tl.sum(x, axis=1)[:, None]


@triton.jit(do_not_specialize=["M"])
def _poly_norm_kernel(
    x_ptr, weight_ptr, bias_ptr, y_ptr, M, N, eps,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    rows, cols, offsets = tile_offsets(N, BLOCK_M, BLOCK_N)
    weight_3, weight_2, weight_1, bias = weights_of(weight_ptr, bias_ptr)
    for tile in tl.range(tl.program_id(0).to(tl.int64), tl.cdiv(M, BLOCK_M), tl.num_programs(0)):
        row = tile * BLOCK_M
        start = row * N
        mask = (rows < remaining(M, row, BLOCK_M)) & (cols < N)
        x = load(x_ptr + start, offsets, mask)
        square, fourth, sixth = even_powers(x)
        scale_3 = weight_3 * tl.rsqrt(_sum(sixth) / N + eps)
        scale_2 = weight_2 * tl.rsqrt(_sum(fourth) / N + eps)
        scale_1 = weight_1 * tl.rsqrt(_sum(square) / N + eps)
        y = poly_result(x, scale_3, scale_2, scale_1, bias)
        tl.store(y_ptr + start + offsets, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["M"])
def _poly_norm_wide_kernel(
    x_ptr, weight_ptr, bias_ptr, y_ptr, M, N, eps,
    ROW: tl.constexpr, KEPT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # The second pass takes the row from the buffer if it is kept, and else finds it in the L2
    # cache.
    rows, cols, offsets = tile_offsets(N, BLOCK_M, BLOCK_N)
    weight_3, weight_2, weight_1, bias = weights_of(weight_ptr, bias_ptr)
    for tile in tl.range(tl.program_id(0).to(tl.int64), tl.cdiv(M, BLOCK_M), tl.num_programs(0)):
        row = tile * BLOCK_M
        row_mask = rows < remaining(M, row, BLOCK_M)
        if KEPT:
            x_row = kept_row(x_ptr + row * N, N, ROW)
        sums_2 = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        sums_4 = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        sums_6 = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for col in tl.range(0, N, BLOCK_N):
            if KEPT:
                x = piece(x_row, col, BLOCK_N)
            else:
                mask = row_mask & (cols < remaining(N, col, BLOCK_N))
                x = load(x_ptr + row * N + col, offsets, mask)
            square, fourth, sixth = even_powers(x)
            sums_2 += square
            sums_4 += fourth
            sums_6 += sixth
        scale_3 = weight_3 * tl.rsqrt(_sum(sums_6) / N + eps)
        scale_2 = weight_2 * tl.rsqrt(_sum(sums_4) / N + eps)
        scale_1 = weight_1 * tl.rsqrt(_sum(sums_2) / N + eps)
        for col in tl.range(0, N, BLOCK_N):
            start = row * N + col
            mask = row_mask & (cols < remaining(N, col, BLOCK_N))
            if KEPT:
                x = piece(x_row, col, BLOCK_N)
            else:
                x = load(x_ptr + start, offsets, mask)
            y = poly_result(x, scale_3, scale_2, scale_1, bias)
            tl.store(y_ptr + start + offsets, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _store_sums(
    sums_ptr, row, rows, row_mask, M,
    dweight_3, dweight_2, dweight_1, dbias,
):  # fmt: skip
    """Store the rows' terms of dweight and dbias, as columns of (4, M)."""
    at = sums_ptr + row + rows
    tl.store(at, dweight_3, mask=row_mask)
    tl.store(at + M.to(tl.int64), dweight_2, mask=row_mask)
    tl.store(at + 2 * M.to(tl.int64), dweight_1, mask=row_mask)
    tl.store(at + 3 * M.to(tl.int64), dbias, mask=row_mask)


@triton.jit(do_not_specialize=["M"])
def _poly_norm_backward_kernel(
    dy_ptr, x_ptr, weight_ptr, dx_ptr, sums_ptr, M, N, eps,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    rows, cols, offsets = tile_offsets(N, BLOCK_M, BLOCK_N)
    weight_3, weight_2, weight_1, _ = weights_of(weight_ptr, None)
    for tile in tl.range(tl.program_id(0).to(tl.int64), tl.cdiv(M, BLOCK_M), tl.num_programs(0)):
        row = tile * BLOCK_M
        start = row * N
        row_mask = rows < remaining(M, row, BLOCK_M)
        mask = row_mask & (cols < N)
        dy = load(dy_ptr + start, offsets, mask)
        x = load(x_ptr + start, offsets, mask)
        square, fourth, sixth = even_powers(x)
        rstd_3 = tl.rsqrt(_sum(sixth) / N + eps)
        rstd_2 = tl.rsqrt(_sum(fourth) / N + eps)
        rstd_1 = tl.rsqrt(_sum(square) / N + eps)
        product_1 = _sum(dy * x)
        product_2 = _sum(dy * square)
        product_3 = _sum(dy * square * x)
        if sums_ptr is not None:
            _store_sums(
                sums_ptr, row, rows, row_mask, M,
                rstd_3 * product_3, rstd_2 * product_2, rstd_1 * product_1, _sum(dy),
            )  # fmt: skip
        if dx_ptr is not None:
            dx = poly_gradient(
                dy, x, weight_3 * rstd_3, weight_2 * rstd_2, weight_1 * rstd_1,
                slope_factor(weight_3, rstd_3, product_3, N),
                slope_factor(weight_2, rstd_2, product_2, N),
                slope_factor(weight_1, rstd_1, product_1, N),
            )  # fmt: skip
            tl.store(dx_ptr + start + offsets, dx.to(dx_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["M"])
def _poly_norm_wide_backward_kernel(
    dy_ptr, x_ptr, weight_ptr, dx_ptr, sums_ptr, M, N, eps,
    ROW: tl.constexpr, KEPT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    rows, cols, offsets = tile_offsets(N, BLOCK_M, BLOCK_N)
    weight_3, weight_2, weight_1, _ = weights_of(weight_ptr, None)
    for tile in tl.range(tl.program_id(0).to(tl.int64), tl.cdiv(M, BLOCK_M), tl.num_programs(0)):
        row = tile * BLOCK_M
        row_mask = rows < remaining(M, row, BLOCK_M)
        if KEPT:
            dy_row = kept_row(dy_ptr + row * N, N, ROW)
            x_row = kept_row(x_ptr + row * N, N, ROW)
        sum_2 = tl.zeros((BLOCK_M, 1), tl.float32)
        sum_4 = tl.zeros((BLOCK_M, 1), tl.float32)
        sum_6 = tl.zeros((BLOCK_M, 1), tl.float32)
        product_1 = tl.zeros((BLOCK_M, 1), tl.float32)
        product_2 = tl.zeros((BLOCK_M, 1), tl.float32)
        product_3 = tl.zeros((BLOCK_M, 1), tl.float32)
        sum_dy = tl.zeros((BLOCK_M, 1), tl.float32)
        for col in tl.range(0, N, BLOCK_N):
            if KEPT:
                dy = piece(dy_row, col, BLOCK_N)
                x = piece(x_row, col, BLOCK_N)
            else:
                mask = row_mask & (cols < remaining(N, col, BLOCK_N))
                dy = load(dy_ptr + row * N + col, offsets, mask)
                x = load(x_ptr + row * N + col, offsets, mask)
            square, fourth, sixth = even_powers(x)
            sum_2 += _sum(square)
            sum_4 += _sum(fourth)
            sum_6 += _sum(sixth)
            product_1 += _sum(dy * x)
            product_2 += _sum(dy * square)
            product_3 += _sum(dy * square * x)
            sum_dy += _sum(dy)
        rstd_3 = tl.rsqrt(sum_6 / N + eps)
        rstd_2 = tl.rsqrt(sum_4 / N + eps)
        rstd_1 = tl.rsqrt(sum_2 / N + eps)
        if sums_ptr is not None:
            _store_sums(
                sums_ptr, row, rows, row_mask, M,
                rstd_3 * product_3, rstd_2 * product_2, rstd_1 * product_1, sum_dy,
            )  # fmt: skip
        if dx_ptr is not None:
            slope_3 = slope_factor(weight_3, rstd_3, product_3, N)
            slope_2 = slope_factor(weight_2, rstd_2, product_2, N)
            slope_1 = slope_factor(weight_1, rstd_1, product_1, N)
            for col in tl.range(0, N, BLOCK_N):
                start = row * N + col
                mask = row_mask & (cols < remaining(N, col, BLOCK_N))
                if KEPT:
                    dy = piece(dy_row, col, BLOCK_N)
                    x = piece(x_row, col, BLOCK_N)
                else:
                    dy = load(dy_ptr + start, offsets, mask)
                    x = load(x_ptr + start, offsets, mask)
                dx = poly_gradient(
                    dy, x, weight_3 * rstd_3, weight_2 * rstd_2, weight_1 * rstd_1,
                    slope_3, slope_2, slope_1,
                )  # fmt: skip
                tl.store(dx_ptr + start + offsets, dx.to(dx_ptr.dtype.element_ty), mask=mask)


@library.kernel("poly_norm", "npu")
def poly_norm(call: Any, y: Tensor, plan: Plan | None) -> None:
    x = tiling.rows(call.x)
    plan = plan or tiling.plan("poly_norm", x.shape[1], x)
    inputs = (x, contiguous(call.weight), call.bias, y)
    launch_rows((_poly_norm_kernel, _poly_norm_wide_kernel), plan, *inputs, *x.shape, call.eps)


@library.kernel("poly_norm_backward", "npu")
def poly_norm_backward(
    call: Any, dx: Tensor | None, dweight: Tensor | None, dbias: Tensor | None, plan: Plan | None
) -> None:
    dy, x = tiling.rows(call.dy), tiling.rows(call.x)
    plan = plan or tiling.plan("poly_norm_backward", x.shape[1], dy, x)
    # A row's terms of the three numbers of dweight, and of dbias.
    sums = None
    if dweight is not None or dbias is not None:
        sums = x.new_empty((4, x.shape[0]), dtype=torch.float32)
    inputs = (dy, x, contiguous(call.weight), dx, sums)
    kernels = (_poly_norm_backward_kernel, _poly_norm_wide_backward_kernel)
    launch_rows(kernels, plan, *inputs, *x.shape, call.eps)
    if sums is not None:
        summed(sums[:3].T, dweight)
        summed(sums[3], None if dbias is None else dbias.reshape(()))
