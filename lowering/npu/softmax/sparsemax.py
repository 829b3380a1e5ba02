"""sparsemax, along the last dimension. M rows, N columns.

Newton's iteration finds tau, the threshold above which elements are in the support; a step sums the
elements above it, and counts them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .... import library
from ...common.softmax.sparsemax_math import (
    above,
    below_maximum,
    is_above,
    newton_step,
    sparsemax_gradient,
    supported,
)
from .. import tiling
from ..norms.resident_rows import kept_row, piece
from ..tile import load, load_logits, remaining, tile_offsets
from ..tiling import COSTS, Cost, Kept, launch_rows

# whole (1, 4096): 75.5% | 67.1%, (2, 1024): 40.4%. wide (1, 2048): 54.8%, (1, 4096): 92.3%.
# kept 8192 in pieces of 4096: 84.0%, 16384 of 2048: 75.6%, fp32 16384 of 1024: 86.0%.
COSTS["sparsemax"] = Cost(
    {2: 40.1, 4: 40.1}, {2: 52.7, 4: 52.7}, kept=(Kept({2: 5.8, 4: 8.1}, {2: 30.1, 4: 36.5}),)
)
# whole (2, 1024): 46.2% | 46.2%, (1, 4096): 92.0%. wide (1, 2048): 62.8%.
# kept 8192 in pieces of 2048: 79.4%, 16384 of 1024: 89.8%, fp32 8192 of 1024: 83.6%.
COSTS["sparsemax_backward"] = Cost(
    {2: 44.3, 4: 44.3}, {2: 60.3, 4: 60.3}, kept=(Kept({2: 8.1, 4: 16.1}, {2: 40.1, 4: 40.1}),)
)


@triton.jit
def _sum(x):
    return tl.sum(x, axis=1)[:, None]


@triton.jit
def whole_sparsemax(x, steps, BLOCK_M: tl.constexpr):
    """Return the sparsemax of each row of a tile, in at most `steps`. Elements of -inf give 0."""
    below = below_maximum(x, tl.max(x, axis=1)[:, None])
    tau = tl.full((BLOCK_M, 1), -1.0, tl.float32)
    count = tl.full((BLOCK_M, 1), float("inf"), tl.float32)
    active = tl.full((BLOCK_M, 1), 1.0, tl.float32)
    going = 1.0
    for _ in tl.range(0, steps):
        # Triton's loops have no break: turns after the last row has converged do nothing.
        if going > 0:
            sum, higher = _sum(above(below, tau)), _sum(is_above(below, tau))
            tau, count, active = newton_step(tau, count, active, sum, higher)
            going = tl.max(tl.max(active, axis=1), axis=0)
    return above(below, tau)


@triton.jit(do_not_specialize=["M"])
def _sparsemax_kernel(x_ptr, y_ptr, M, N, steps, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    rows, cols, offsets = tile_offsets(N, BLOCK_M, BLOCK_N)
    for tile in tl.range(tl.program_id(0).to(tl.int64), tl.cdiv(M, BLOCK_M), tl.num_programs(0)):
        row = tile * BLOCK_M
        start = row * N
        mask = (rows < remaining(M, row, BLOCK_M)) & (cols < N)
        x = load_logits(x_ptr + start, offsets, mask)
        y = whole_sparsemax(x, steps, BLOCK_M)
        tl.store(y_ptr + start + offsets, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["M"])
def _sparsemax_wide_kernel(
    x_ptr, y_ptr, M, N, steps,
    ROW: tl.constexpr, KEPT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # Every step takes the row from the buffer if it is kept, and else finds it in the L2 cache.
    rows, cols, offsets = tile_offsets(N, BLOCK_M, BLOCK_N)
    for tile in tl.range(tl.program_id(0).to(tl.int64), tl.cdiv(M, BLOCK_M), tl.num_programs(0)):
        row = tile * BLOCK_M
        row_mask = rows < remaining(M, row, BLOCK_M)
        if KEPT:
            x_row = kept_row(x_ptr + row * N, N, ROW, -float("inf"))
        maximum = tl.full((BLOCK_M, 1), -float("inf"), tl.float32)
        for col in tl.range(0, N, BLOCK_N):
            if KEPT:
                x = piece(x_row, col, BLOCK_N)
            else:
                mask = row_mask & (cols < remaining(N, col, BLOCK_N))
                x = load_logits(x_ptr + row * N + col, offsets, mask)
            maximum = tl.maximum(maximum, tl.max(x, axis=1)[:, None])
        tau = tl.full((BLOCK_M, 1), -1.0, tl.float32)
        count = tl.full((BLOCK_M, 1), float("inf"), tl.float32)
        active = tl.full((BLOCK_M, 1), 1.0, tl.float32)
        # The columns that a step reads: none once the iteration has converged.
        end = N
        for _ in tl.range(0, steps):
            sum = tl.zeros((BLOCK_M, 1), tl.float32)
            higher = tl.zeros((BLOCK_M, 1), tl.float32)
            for col in tl.range(0, end, BLOCK_N):
                if KEPT:
                    x = piece(x_row, col, BLOCK_N)
                else:
                    mask = row_mask & (cols < remaining(N, col, BLOCK_N))
                    x = load_logits(x_ptr + row * N + col, offsets, mask)
                below = below_maximum(x, maximum)
                sum += _sum(above(below, tau))
                higher += _sum(is_above(below, tau))
            tau, count, active = newton_step(tau, count, active, sum, higher)
            going = tl.max(tl.max(active, axis=1), axis=0)
            end = tl.where(going > 0, N, 0)
        for col in tl.range(0, N, BLOCK_N):
            start = row * N + col
            mask = row_mask & (cols < remaining(N, col, BLOCK_N))
            if KEPT:
                x = piece(x_row, col, BLOCK_N)
            else:
                x = load_logits(x_ptr + start, offsets, mask)
            y = above(below_maximum(x, maximum), tau)
            tl.store(y_ptr + start + offsets, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["M"])
def _sparsemax_backward_kernel(
    dy_ptr, y_ptr, dx_ptr, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    rows, cols, offsets = tile_offsets(N, BLOCK_M, BLOCK_N)
    for tile in tl.range(tl.program_id(0).to(tl.int64), tl.cdiv(M, BLOCK_M), tl.num_programs(0)):
        row = tile * BLOCK_M
        start = row * N
        mask = (rows < remaining(M, row, BLOCK_M)) & (cols < N)
        dy = load(dy_ptr + start, offsets, mask)
        y = load(y_ptr + start, offsets, mask)
        mean = _sum(supported(dy, y)) / _sum(is_above(y, 0.0))
        dx = sparsemax_gradient(dy, y, mean)
        tl.store(dx_ptr + start + offsets, dx.to(dx_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["M"])
def _sparsemax_wide_backward_kernel(
    dy_ptr, y_ptr, dx_ptr, M, N,
    ROW: tl.constexpr, KEPT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    rows, cols, offsets = tile_offsets(N, BLOCK_M, BLOCK_N)
    for tile in tl.range(tl.program_id(0).to(tl.int64), tl.cdiv(M, BLOCK_M), tl.num_programs(0)):
        row = tile * BLOCK_M
        row_mask = rows < remaining(M, row, BLOCK_M)
        if KEPT:
            dy_row = kept_row(dy_ptr + row * N, N, ROW)
            y_row = kept_row(y_ptr + row * N, N, ROW)
        sum = tl.zeros((BLOCK_M, 1), tl.float32)
        count = tl.zeros((BLOCK_M, 1), tl.float32)
        for col in tl.range(0, N, BLOCK_N):
            if KEPT:
                dy = piece(dy_row, col, BLOCK_N)
                y = piece(y_row, col, BLOCK_N)
            else:
                mask = row_mask & (cols < remaining(N, col, BLOCK_N))
                dy = load(dy_ptr + row * N + col, offsets, mask)
                y = load(y_ptr + row * N + col, offsets, mask)
            sum += _sum(supported(dy, y))
            count += _sum(is_above(y, 0.0))
        mean = sum / count
        for col in tl.range(0, N, BLOCK_N):
            start = row * N + col
            mask = row_mask & (cols < remaining(N, col, BLOCK_N))
            if KEPT:
                dy = piece(dy_row, col, BLOCK_N)
                y = piece(y_row, col, BLOCK_N)
            else:
                dy = load(dy_ptr + start, offsets, mask)
                y = load(y_ptr + start, offsets, mask)
            dx = sparsemax_gradient(dy, y, mean)
            tl.store(dx_ptr + start + offsets, dx.to(dx_ptr.dtype.element_ty), mask=mask)


def most_steps(N: int) -> int:
    """Return an upper bound of the steps of Newton's iteration for N elements."""
    return N.bit_length() + 14


@library.kernel("sparsemax_forward", "npu")
def sparsemax_forward(call, y, plan):
    x = tiling.rows(call.x)
    plan = plan or tiling.plan("sparsemax", x.shape[1], x)
    kernels = (_sparsemax_kernel, _sparsemax_wide_kernel)
    launch_rows(kernels, plan, x, y, *x.shape, most_steps(x.shape[1]))


@library.kernel("sparsemax_backward", "npu")
def sparsemax_backward(call, dx, plan):
    dy, y = tiling.rows(call.dy), tiling.rows(call.y)
    plan = plan or tiling.plan("sparsemax_backward", y.shape[1], dy, y)
    kernels = (_sparsemax_backward_kernel, _sparsemax_wide_backward_kernel)
    launch_rows(kernels, plan, dy, y, dx, *y.shape)
