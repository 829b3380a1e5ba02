"""sparsemax, along the last dimension. M rows, N columns."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .... import library
from ...common.softmax.sparsemax_math import (
    above,
    below_maximum,
    is_above,
    newton_step,
    sparsemax_gradient,
    supported,
)
from ...common.triton_math import folded, to_float32_again
from ..launch import TwoPass, WholeRow, launch, launch_whole_rows, plan_whole_rows, rows
from ..sums import two_row_sums, two_totals


@triton.jit
def whole_sparsemax(x, BLOCK_M: tl.constexpr):
    """Compute the sparsemax of each row of a tile. Elements of -inf give 0."""
    below = below_maximum(x, tl.max(x, 1)[:, None])
    tau = tl.full((BLOCK_M, 1), -1.0, tl.float32)
    count = tl.full((BLOCK_M, 1), float("inf"), tl.float32)
    active = tl.full((BLOCK_M, 1), 1.0, tl.float32)
    # Until the slowest row of the tile has ended. `active` compares counts, so that a row of NaN
    # ends too.
    going = 1.0
    while going > 0:
        sum, higher = two_row_sums(above(below, tau), is_above(below, tau))
        tau, count, active = newton_step(tau, count, active, sum, higher)
        going = tl.max(tl.max(active, 1), 0)
    return above(below, tau)


@triton.jit(do_not_specialize=["M"])
def sparsemax_kernel(
    x_ptr, y_ptr, M, N, stride_x, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    # The row stays in registers while Newton's iteration goes over it.
    rows = (tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
    cols = tl.arange(0, BLOCK_N)[None, :]
    mask = (rows < M) & (cols < N)
    x = tl.load(x_ptr + rows * stride_x + cols, mask=mask, other=-float("inf")).to(tl.float32)
    y = whole_sparsemax(x, BLOCK_M)
    tl.store(y_ptr + rows * N + cols, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def row_tile(row_ptr, cols, N, other):
    """Load a tile of a row as float32, and ask the caches to keep it."""
    return tl.load(row_ptr + cols, mask=cols < N, other=other, eviction_policy="evict_last").to(
        tl.float32
    )


@triton.jit
def row_maximum(x_ptr, N, BLOCK_N: tl.constexpr):
    """Compute the maximum of a row that is wider than a tile."""
    lowest = -float("inf")
    maxima = tl.full((BLOCK_N,), lowest, tl.float32)
    for start in tl.range(0, N, BLOCK_N, num_stages=1):
        maxima = tl.maximum(maxima, row_tile(x_ptr, start + tl.arange(0, BLOCK_N), N, lowest))
    return tl.max(maxima, 0)


@triton.jit
def wide_threshold(x_ptr, N, maximum, BLOCK_N: tl.constexpr, FOLD: tl.constexpr):
    """Compute tau of a row that is wider than a tile. Every step reads the row again, from the L2
    cache."""
    tau = -1.0
    count = float("inf")
    active = 1.0
    while active > 0:
        sums = tl.zeros((BLOCK_N // FOLD,), tl.float32)
        counts = tl.zeros((BLOCK_N // FOLD,), tl.float32)
        for start in tl.range(0, N, BLOCK_N, num_stages=1):
            x = row_tile(x_ptr, start + tl.arange(0, BLOCK_N), N, -float("inf"))
            below = below_maximum(x, maximum)
            sums += folded(above(below, tau), FOLD)
            counts += folded(is_above(below, tau), FOLD)
        sum, higher = two_totals(sums, counts)
        tau, count, active = newton_step(tau, count, active, sum, higher)
    return tau


@triton.jit(do_not_specialize=["M"])
def sparsemax_wide_kernel(
    x_ptr, y_ptr, M, N, stride_x, BLOCK_N: tl.constexpr, FOLD: tl.constexpr
):  # fmt: skip
    # A program has one row.
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * stride_x
    maximum = row_maximum(x_ptr, N, BLOCK_N)
    tau = wide_threshold(x_ptr, N, maximum, BLOCK_N, FOLD)
    for start in tl.range(0, N, BLOCK_N, num_stages=1):
        cols = start + tl.arange(0, BLOCK_N)
        x = row_tile(x_ptr, cols, N, -float("inf"))
        y = above(below_maximum(x, maximum), tau)
        tl.store(y_ptr + row * N + cols, y.to(y_ptr.dtype.element_ty), mask=cols < N)


@triton.jit(do_not_specialize=["M"])
def sparsemax_backward_kernel(
    dy_ptr, y_ptr, dx_ptr, M, N, stride_dy, stride_y,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    rows = (tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
    cols = tl.arange(0, BLOCK_N)[None, :]
    mask = (rows < M) & (cols < N)
    dy = tl.load(dy_ptr + rows * stride_dy + cols, mask=mask, other=0.0)
    y = tl.load(y_ptr + rows * stride_y + cols, mask=mask, other=0.0)
    wide = y.to(tl.float32)
    sum, count = two_row_sums(supported(dy.to(tl.float32), wide), is_above(wide, 0.0))
    dx = sparsemax_gradient(to_float32_again(dy), to_float32_again(y), sum / count)
    tl.store(dx_ptr + rows * N + cols, dx.to(dx_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["M"])
def sparsemax_wide_backward_kernel(
    dy_ptr, y_ptr, dx_ptr, M, N, stride_dy, stride_y,
    BLOCK_N: tl.constexpr, FOLD: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    dy_ptr += row * stride_dy
    y_ptr += row * stride_y
    sums = tl.zeros((BLOCK_N // FOLD,), tl.float32)
    counts = tl.zeros((BLOCK_N // FOLD,), tl.float32)
    for start in tl.range(0, N, BLOCK_N, num_stages=1):
        cols = start + tl.arange(0, BLOCK_N)
        y = row_tile(y_ptr, cols, N, 0.0)
        sums += folded(supported(row_tile(dy_ptr, cols, N, 0.0), y), FOLD)
        counts += folded(is_above(y, 0.0), FOLD)
    sum, count = two_totals(sums, counts)
    for start in tl.range(0, N, BLOCK_N, num_stages=1):
        cols = start + tl.arange(0, BLOCK_N)
        dy = row_tile(dy_ptr, cols, N, 0.0)
        dx = sparsemax_gradient(dy, row_tile(y_ptr, cols, N, 0.0), sum / count)
        tl.store(dx_ptr + row * N + cols, dx.to(dx_ptr.dtype.element_ty), mask=cols < N)


# Rows that a program can hold are read once; a wider row is read with every step.
WIDEST = 32768


def plan_forward(N: int) -> WholeRow | TwoPass:
    """Plan whole rows up to WIDEST columns, of which 1024 threads hold 32 float32 each."""
    return plan_whole_rows(N, 1024) if N <= WIDEST else TwoPass(8192, 512)


def plan_backward(N: int) -> WholeRow | TwoPass:
    """Plan whole rows up to WIDEST columns. 8192 x 32768 in bfloat16 take 0.411 ms on an H200 with
    1024 threads, 0.601 with 512, and 0.484 in two passes; 8192 x 16384 take 0.190, 0.221 and 0.194.
    """
    return plan_whole_rows(N, 1024) if N <= WIDEST else TwoPass(8192, 512)


def wide_options(plan: TwoPass, x: Tensor) -> dict[str, int]:
    """Return the constants and options of a kernel for wide rows."""
    # A thread loads 16 bytes at once.
    fold = min(plan.BLOCK_N, 16 // x.element_size())
    return {"BLOCK_N": plan.BLOCK_N, "FOLD": fold, "num_warps": plan.num_warps}


@library.kernel("sparsemax_forward", "cuda")
def sparsemax_forward(call, y, plan):
    x = rows(call.x)
    M, N = x.shape
    plan = plan or plan_forward(N)
    arguments = (x, y, M, N, x.stride(0))
    if isinstance(plan, WholeRow):
        launch_whole_rows(sparsemax_kernel, plan, x, *arguments)
    else:
        launch(sparsemax_wide_kernel, (M,), x, *arguments, **wide_options(plan, x))


@library.kernel("sparsemax_backward", "cuda")
def sparsemax_backward(call, dx, plan):
    dy, y = rows(call.dy), rows(call.y)
    M, N = y.shape
    plan = plan or plan_backward(N)
    arguments = (dy, y, dx, M, N, dy.stride(0), y.stride(0))
    if isinstance(plan, WholeRow):
        launch_whole_rows(sparsemax_backward_kernel, plan, y, *arguments)
    else:
        launch(sparsemax_wide_backward_kernel, (M,), y, *arguments, **wide_options(plan, y))
