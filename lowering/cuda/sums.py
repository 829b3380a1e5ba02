"""Sums over rows, and deterministic gradients of weights.

Several sums over rows are one reduction of joined tiles: their partial sums cross the shared memory
together, and the warps of a program wait once.

For the gradient of a weight programs store partial sums, and a kernel adds them in a fixed order.
Atomics would add them in another order in each run.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from ..common.tensors import cdiv
from .launch import dependent_launch, launch


@triton.jit
def two_sums(a, b):
    """Sum the rows of two (M, N) tiles: (M, 1) each."""
    a, b = tl.split(tl.sum(tl.join(a, b), 1))
    return a[:, None], b[:, None]


@triton.jit
def two_row_sums(a, b):
    """Compute two_sums of tiles as they are loaded: first over neighbours, which one thread
    holds, so that joining the tiles takes 1 / FOLD of the registers."""
    FOLD: tl.constexpr = 8 if a.shape[1] >= 8 else a.shape[1]
    shape: tl.constexpr = (a.shape[0], a.shape[1] // FOLD, FOLD)
    return two_sums(tl.sum(tl.reshape(a, shape), 2), tl.sum(tl.reshape(b, shape), 2))


@triton.jit
def two_totals(a, b):
    """Sum each of two vectors."""
    return tl.split(tl.sum(tl.join(a, b), 0))


@triton.jit
def four_totals(a, b, c, d):
    """Sum each of four vectors."""
    return _four(a, b, c, d, 0)


@triton.jit
def four_sums(a, b, c, d):
    """Sum the rows of four (M, N) tiles: (M,) each."""
    return _four(a, b, c, d, 1)


@triton.jit
def _four(a, b, c, d, AXIS: tl.constexpr):
    ab, cd = tl.split(tl.sum(tl.join(tl.join(a, b), tl.join(c, d)), AXIS))
    a, b = tl.split(ab)
    c, d = tl.split(cd)
    return a, b, c, d


@triton.jit
def near_mean(x_ptr, N):
    """Compute the mean of the first 32 of N elements, rounded to x's dtype.

    A sum of squares of x - near_mean loses little precision, whatever the mean of all elements is.
    The rounded mean can be the value of masked elements, which are then 0 once it is subtracted.
    """
    near = tl.arange(0, 32)
    x = tl.load(x_ptr + near, mask=near < N, other=0.0).to(tl.float32)
    return (tl.sum(x, 0) / tl.minimum(N, 32)).to(x_ptr.dtype.element_ty)


@triton.jit
def first_mean(x_ptr, N, BLOCK_N: tl.constexpr):
    """Compute the mean of the first of the T tiles of a row.

    A sum of squares of x - first_mean loses at most a factor of T in precision, whatever the row's
    mean is.
    """
    cols = tl.arange(0, BLOCK_N)
    x = tl.load(x_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
    return tl.sum(x, 0) / tl.minimum(N, BLOCK_N)


@triton.jit
def mean_and_rstd(sum, square, shift, length, eps):
    """Return the mean of `length` elements, 1 / their standard deviation, and mean - shift.

    sum is the sum of x - shift over the elements, and square that of (x - shift)**2.
    """
    step = sum / length
    # Rounding may leave less than 0.
    variance = tl.maximum(square / length - step * step, 0.0)
    return shift + step, tl.rsqrt(variance + eps), step


@triton.jit
def store_column_sums(ptr, tile, row, cols, N):
    """Store the sums of a tile's columns as a row of (rows, N)."""
    tl.store(ptr + row * N + cols, tl.sum(tile, 0)[None, :], mask=cols < N)


@triton.jit
def _sum_columns(partial_ptr, out_ptr, P, N, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr):
    cols = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    sums = tl.zeros((BLOCK_P, BLOCK_N), tl.float32)
    for start in range(0, P, BLOCK_P):
        rows = start + tl.arange(0, BLOCK_P)[:, None]
        mask = (rows < P) & (cols < N)
        sums += tl.load(partial_ptr + rows.to(tl.int64) * N + cols, mask=mask, other=0.0)
    total = tl.sum(sums, 0)[None, :]
    tl.store(out_ptr + cols, total.to(out_ptr.dtype.element_ty), mask=cols < N)


@triton.jit(do_not_specialize=["P"])
def _column_sums_kernel(
    partial_ptr, out_ptr, second_partial_ptr, second_out_ptr, P, N,
    DEPENDENT: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # One gradient, or two in one launch: the second dimension of the grid is the gradient.
    if DEPENDENT:
        gdc_wait()
    if second_partial_ptr is None:
        _sum_columns(partial_ptr, out_ptr, P, N, BLOCK_P, BLOCK_N)
    else:
        if tl.program_id(1) == 0:
            _sum_columns(partial_ptr, out_ptr, P, N, BLOCK_P, BLOCK_N)
        else:
            _sum_columns(second_partial_ptr, second_out_ptr, P, N, BLOCK_P, BLOCK_N)


def partial_sums(dweight: Tensor | None, programs: int) -> Tensor | None:
    """Allocate a float32 row for each program, which stores its part of dweight there once.

    The memory is uninitialised: every program must write its whole row.
    """
    if dweight is None:
        return None
    return dweight.new_empty((programs, dweight.numel()), dtype=torch.float32)


def summed(*gradients: tuple[Tensor | None, Tensor | None]) -> None:
    """Sum the programs' rows into the gradients, in float32 and in a fixed order.

    `gradients` are one or two pairs: the `partial_sums`, and the gradient that they are added up
    in; both None if the gradient is not wanted. Two gradients have the same shape.
    """
    wanted = [(parts, out) for parts, out in gradients if parts is not None and out is not None]
    if not wanted:
        return
    parts = wanted[0][0]
    P, N = parts.shape
    # 132 x 16384 takes 8 us and 528 x 4096 takes 9; torch.sum and a cast take 15 and 26. Wider rows
    # have fewer parts, and fill the GPU with wider blocks.
    BLOCK_N = 8 if N < 4096 else 16 if N < 32768 else 64
    launch(
        _column_sums_kernel, (cdiv(N, BLOCK_N), len(wanted)), parts,
        *wanted[0], *(wanted[1] if len(wanted) > 1 else (None, None)),
        P, N,
        BLOCK_P=128, BLOCK_N=BLOCK_N, num_warps=4, **dependent_launch(parts),
    )  # fmt: skip
