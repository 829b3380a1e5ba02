"""softmax and log_softmax. M rows, N columns."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ...common.softmax.softmax import register
from ...common.triton_math import LOWEST
from .. import tiling
from ..norms.resident_rows import kept_row, piece, widened
from ..tile import load, load_logits, online_updated, remaining, tile_offsets
from ..tiling import COSTS, Cost, Kept, Plan, launch_rows

# Measured for log_softmax, which takes as much as softmax or more. whole (1, 8192): 75.3% | 58.6%,
# (2, 2048) padded 42.1% | 33.8%. wide (1, 4096): 46.2% | 37.9%, (1, 8192): 92.1% | 75.4%.
# kept 16384 in pieces of 1024: 41.0%, of 4096: 62.9%, fp32 8192 of 2048: 48.3%.
COSTS["softmax"] = Cost(
    {2: 18.1, 4: 14.1},
    {2: 22.2, 4: 18.2},
    padding=2.2,
    kept=(Kept({2: 4.1, 4: 8.1}, {2: 14.6, 4: 14.6}),),
)
# whole (1, 4096): 54.5% | 46.1%, (1, 8192): 100.0% | 91.7%. wide (1, 4096): 79.2% | 70.9%.
# kept 8192 in pieces of 2048: 56.3%, 16384 of 1024: 78.2%, fp32 8192 of 1024: 76.1%.
# kept as float32 8192 in pieces of 1024: 81.3%, of 2048: 87.5%.
COSTS["softmax_backward"] = Cost(
    {2: 26.2, 4: 22.2},
    {2: 38.1, 4: 34.1},
    kept=(
        Kept({2: 8.1, 4: 16.1}, {2: 22.2, 4: 18.4}),
        Kept({2: 18.1, 4: 18.1}, {2: 14.1, 4: 14.1}),
    ),
)


@triton.jit(do_not_specialize=["M"])
def _softmax_kernel(
    x_ptr, y_ptr, M, N,
    LOG: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    rows, cols, offsets = tile_offsets(N, BLOCK_M, BLOCK_N)
    for tile in tl.range(tl.program_id(0).to(tl.int64), tl.cdiv(M, BLOCK_M), tl.num_programs(0)):
        row = tile * BLOCK_M
        start = row * N
        mask = (rows < remaining(M, row, BLOCK_M)) & (cols < N)
        x = load_logits(x_ptr + start, offsets, mask)
        x = x - tl.max(x, axis=1)[:, None]
        exp = tl.exp(x)
        sum = tl.sum(exp, axis=1)[:, None]
        y = x - tl.log(sum) if LOG else exp / sum
        tl.store(y_ptr + start + offsets, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["M"])
def _softmax_wide_kernel(
    x_ptr, y_ptr, M, N,
    LOG: tl.constexpr, ROW: tl.constexpr, KEPT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # The first pass is an online softmax: each row keeps a running maximum, and a sum of
    # exponentials relative to it. The second pass takes the rows from the buffer if they are kept,
    # and else finds them in the L2 cache.
    rows, cols, offsets = tile_offsets(N, BLOCK_M, BLOCK_N)
    for tile in tl.range(tl.program_id(0).to(tl.int64), tl.cdiv(M, BLOCK_M), tl.num_programs(0)):
        row = tile * BLOCK_M
        row_mask = rows < remaining(M, row, BLOCK_M)
        if KEPT:
            x_row = kept_row(x_ptr + row * N, N, ROW, -float("inf"))
        maximum = tl.full((BLOCK_M, 1), LOWEST, tl.float32)
        sum = tl.zeros((BLOCK_M, 1), tl.float32)
        for col in tl.range(0, N, BLOCK_N):
            if KEPT:
                x = piece(x_row, col, BLOCK_N)
            else:
                mask = row_mask & (cols < remaining(N, col, BLOCK_N))
                x = load_logits(x_ptr + row * N + col, offsets, mask)
            maximum, sum = online_updated(x, maximum, sum)
        for col in tl.range(0, N, BLOCK_N):
            start = row * N + col
            mask = row_mask & (cols < remaining(N, col, BLOCK_N))
            if KEPT:
                x = piece(x_row, col, BLOCK_N)
            else:
                x = load(x_ptr + start, offsets, mask)
            x = x - maximum
            y = x - tl.log(sum) if LOG else tl.exp(x) / sum
            tl.store(y_ptr + start + offsets, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["M"])
def _softmax_backward_kernel(
    dy_ptr, y_ptr, dx_ptr, M, N,
    LOG: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    rows, cols, offsets = tile_offsets(N, BLOCK_M, BLOCK_N)
    for tile in tl.range(tl.program_id(0).to(tl.int64), tl.cdiv(M, BLOCK_M), tl.num_programs(0)):
        row = tile * BLOCK_M
        start = row * N
        mask = (rows < remaining(M, row, BLOCK_M)) & (cols < N)
        dy = load(dy_ptr + start, offsets, mask)
        y = load(y_ptr + start, offsets, mask)
        sum = tl.sum(dy if LOG else dy * y, axis=1)[:, None]
        dx = dy - tl.exp(y) * sum if LOG else y * (dy - sum)
        tl.store(dx_ptr + start + offsets, dx.to(dx_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["M"])
def _softmax_wide_backward_kernel(
    dy_ptr, y_ptr, dx_ptr, M, N,
    LOG: tl.constexpr, ROW: tl.constexpr, KEPT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # Level 1 keeps the rows as they are stored, and level 2 as float32, so that nothing is widened
    # twice.
    rows, cols, offsets = tile_offsets(N, BLOCK_M, BLOCK_N)
    for tile in tl.range(tl.program_id(0).to(tl.int64), tl.cdiv(M, BLOCK_M), tl.num_programs(0)):
        row = tile * BLOCK_M
        row_mask = rows < remaining(M, row, BLOCK_M)
        if KEPT:
            dy_row = kept_row(dy_ptr + row * N, N, ROW)
            y_row = kept_row(y_ptr + row * N, N, ROW)
        if KEPT == 2:
            dy_row = widened(dy_row, BLOCK_N)
            y_row = widened(y_row, BLOCK_N)
        sum = tl.zeros((BLOCK_M, 1), tl.float32)
        for col in tl.range(0, N, BLOCK_N):
            if KEPT:
                term = piece(dy_row, col, BLOCK_N)
                if not LOG:
                    term *= piece(y_row, col, BLOCK_N)
            else:
                start = row * N + col
                mask = row_mask & (cols < remaining(N, col, BLOCK_N))
                term = load(dy_ptr + start, offsets, mask)
                if not LOG:
                    term *= load(y_ptr + start, offsets, mask)
            sum += tl.sum(term, axis=1)[:, None]
        for col in tl.range(0, N, BLOCK_N):
            start = row * N + col
            mask = row_mask & (cols < remaining(N, col, BLOCK_N))
            if KEPT:
                dy = piece(dy_row, col, BLOCK_N)
                y = piece(y_row, col, BLOCK_N)
            else:
                dy = load(dy_ptr + start, offsets, mask)
                y = load(y_ptr + start, offsets, mask)
            dx = dy - tl.exp(y) * sum if LOG else y * (dy - sum)
            tl.store(dx_ptr + start + offsets, dx.to(dx_ptr.dtype.element_ty), mask=mask)


def launch_softmax(x: Tensor, y: Tensor, log: bool, plan: Plan | None) -> None:
    """Launch the forward of softmax, or of log_softmax."""
    x = tiling.rows(x)
    plan = plan or tiling.plan("softmax", x.shape[1], x)
    launch_rows((_softmax_kernel, _softmax_wide_kernel), plan, x, y, *x.shape, LOG=log)


def launch_softmax_backward(
    dy: Tensor, y: Tensor, dx: Tensor, log: bool, plan: Plan | None
) -> None:
    """Launch the backward of softmax, or of log_softmax."""
    dy, y = tiling.rows(dy), tiling.rows(y)
    plan = plan or tiling.plan("softmax_backward", y.shape[1], dy, y)
    kernels = (_softmax_backward_kernel, _softmax_wide_backward_kernel)
    launch_rows(kernels, plan, dy, y, dx, *y.shape, LOG=log)


register("npu", launch_softmax, launch_softmax_backward)
