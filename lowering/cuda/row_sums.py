"""Sums over rows. Several sums are one reduction of joined tiles: their partial sums cross the
shared memory together, and the warps of a program wait once."""

from __future__ import annotations

import triton
import triton.language as tl


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
