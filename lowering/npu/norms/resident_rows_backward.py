"""The backward of rms_norm and layer_norm for rows that stay in the Unified Buffer in their own
dtype. A program keeps the sums of its rows' weight gradients, a line for each piece of a row.

Level 1 keeps x, level 2 also dy, and level 3 also the weight; the rest is read in each pass.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...common.sizes import cdiv
from ..tile import remaining, within
from ..tiling import Plan
from .norm_backward import NormBackward
from .resident_rows import kept_mean, kept_or_loaded, kept_row, line, line_added, piece


@triton.jit
def _scale(row, ptr, N, col, offset, CENTRED: tl.constexpr, SIZE: tl.constexpr):
    """Return a piece of the factor of xhat: weight, or weight + offset in rms_norm."""
    weight = kept_or_loaded(row, ptr, N, col, SIZE)
    if not CENTRED:
        weight += offset
    return weight


@triton.jit(do_not_specialize=["M"])
def _kept_backward_kernel(
    dy_ptr, ds_ptr, x_ptr, weight_ptr, dx_ptr, dweight_ptr, dbias_ptr,
    M, N, eps, offset,
    CENTRED: tl.constexpr, PADDED: tl.constexpr, ROW: tl.constexpr, KEPT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    cols = tl.arange(0, BLOCK_N)[None, :]
    weight_row = None
    if KEPT > 2 and weight_ptr is not None:
        weight_row = kept_row(weight_ptr, N, ROW)
    # The lines of dweight, then those of dbias, in one tensor. If a loop carried two tensors, both
    # would start from one buffer of zeros, of which the compiler would make a copy.
    PIECES: tl.constexpr = ROW // BLOCK_N
    DBIAS: tl.constexpr = PIECES if dweight_ptr is not None else 0
    if dbias_ptr is not None:
        sums = tl.zeros((DBIAS + PIECES, BLOCK_N), tl.float32)
    elif dweight_ptr is not None:
        sums = tl.zeros((PIECES, BLOCK_N), tl.float32)
    program = tl.program_id(0).to(tl.int64)
    for row in tl.range(program, M, tl.num_programs(0)):
        start = row * N
        x_row = kept_row(x_ptr + start, N, ROW)
        dy_row = None
        if KEPT > 1:
            dy_row = kept_row(dy_ptr + start, N, ROW)
        if CENTRED:
            mean = kept_mean(x_row, N, BLOCK_N)
        # First pass: the row's sums.
        squares = tl.zeros((1, BLOCK_N), tl.float32)
        products = tl.zeros((1, BLOCK_N), tl.float32)
        sum_g = tl.zeros((1, BLOCK_N), tl.float32)
        for col in tl.range(0, N, BLOCK_N):
            x = piece(x_row, col, BLOCK_N)
            if CENTRED:
                x -= mean
                if PADDED:
                    # Columns beyond the row are -mean now, and would count in the squares.
                    x *= within(cols, remaining(N, col, BLOCK_N))
            squares += x * x
            if dx_ptr is not None:
                g = kept_or_loaded(dy_row, dy_ptr + start, N, col, BLOCK_N)
                if weight_ptr is not None:
                    g *= _scale(weight_row, weight_ptr, N, col, offset, CENTRED, BLOCK_N)
                products += g * x
                if CENTRED:
                    sum_g += g
        rstd = tl.rsqrt(tl.sum(squares, axis=1)[:, None] / N + eps)
        if dx_ptr is not None:
            projection = tl.sum(products, axis=1)[:, None] / N * rstd
            if CENTRED:
                mean_g = tl.sum(sum_g, axis=1)[:, None] / N
        # Second pass: dx, and the row's terms of the weights' gradients.
        for col in tl.range(0, N, BLOCK_N):
            x = piece(x_row, col, BLOCK_N)
            if CENTRED:
                x -= mean
            xhat = x * rstd
            dy = kept_or_loaded(dy_row, dy_ptr + start, N, col, BLOCK_N)
            if dweight_ptr is not None:
                sums = line_added(sums, col // BLOCK_N, dy * xhat)
            if dbias_ptr is not None:
                sums = line_added(sums, DBIAS + col // BLOCK_N, dy)
            if dx_ptr is not None:
                g = dy
                if weight_ptr is not None:
                    g = dy * _scale(weight_row, weight_ptr, N, col, offset, CENTRED, BLOCK_N)
                if CENTRED:
                    g -= mean_g
                dx = (g - xhat * projection) * rstd
                if ds_ptr is not None:
                    dx += kept_or_loaded(None, ds_ptr + start, N, col, BLOCK_N)
                mask = cols < remaining(N, col, BLOCK_N)
                dx_start = start + col
                tl.store(dx_ptr + dx_start + cols, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    for col in tl.range(0, N, BLOCK_N):
        mask = cols < remaining(N, col, BLOCK_N)
        start = program * N + col
        if dweight_ptr is not None:
            tl.store(dweight_ptr + start + cols, line(sums, col // BLOCK_N), mask=mask)
        if dbias_ptr is not None:
            tl.store(dbias_ptr + start + cols, line(sums, DBIAS + col // BLOCK_N), mask=mask)


def launch_kept_backward(norm: NormBackward, plan: Plan, centred: bool) -> None:
    """Launch the backward for kept rows, of layer_norm if `centred`, else of rms_norm."""
    M, N = norm.x.shape
    tiles = cdiv(M, plan.BLOCK_M)
    norm.launch(
        _kept_backward_kernel, plan, tiles, plan.programs(tiles),
        (norm.dy, norm.ds, norm.x, norm.weight, norm.dx), M, N, norm.eps, norm.offset,
        CENTRED=centred, PADDED=N % plan.BLOCK_N != 0, ROW=plan.ROW, KEPT=plan.KEPT,
    )  # fmt: skip
