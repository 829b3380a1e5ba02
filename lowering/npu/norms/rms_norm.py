"""rms_norm, with or without a residual that is added first (fused_add_rms_norm). M rows, N columns.

The forward and the backward each have a kernel for rows that fit a tile, and kernels for rows that
stay in the buffer and are computed in pieces, or that are read twice; `tiling.Plan` says which.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...common.norms.modulation import PLAIN, Modulation
from ...common.norms.norm_math import rms_rstd, rms_scaled, rms_square
from ...common.norms.rms_norm import register, rms_mode
from ...common.tensors import cdiv, contiguous
from .. import tiling
from ..tile import load, remaining, tile_offsets, within
from ..tiling import COSTS, Cost, Kept, Plan, launch, launch_rows
from . import norm_backward
from .modulation import modulated_tile, plan_modulation, within_samples
from .norm_backward import NormBackward, launch_kept_backward
from .resident_rows import kept_or_loaded, kept_row, piece

# The backward of fused_add_rms_norm, which also reads ds, the gradient of x + residual.
_KEPT_WITH_DS = (
    Kept({2: 4.1, 4: 8.1}, {2: 80.4, 4: 77.0}),
    Kept({2: 8.1, 4: 16.1}, {2: 72.2, 4: 72.4}),
    Kept({2: 8.1, 4: 16.1}, {2: 64.3, 4: 64.8}, weights=True),
)
# whole (1, 4096): 58.6% | 37.6%, fp32 (1, 8192): 75.1%. wide (1, 4096): 87.6% | 70.9%.
# kept with the weight, 16384 in pieces of 2048: 81.3%, fp32 8192 of 2048: 77.2%.
COSTS["rms_norm"] = Cost(
    {2: 28.2, 4: 18.1},
    {2: 42.2, 4: 34.1},
    kept=(
        Kept({2: 4.1, 4: 8.2}, {2: 34.3, 4: 30.0}),
        Kept({2: 4.1, 4: 8.2}, {2: 30.3, 4: 26.2}, weights=True),
    ),
)
# In the casting mode "none". kept, 16384 in pieces of 1024: 70.0%.
COSTS["rms_norm_none"] = Cost(
    {2: 28.2, 4: 18.1},
    {2: 42.2, 4: 34.1},
    kept=(
        Kept({2: 4.2, 4: 8.2}, {2: 42.0, 4: 30.0}),
        Kept({2: 4.2, 4: 8.2}, {2: 38.0, 4: 26.2}, weights=True),
    ),
)
# whole (1, 4096): 91.8% | 54.2%. wide (1, 2048): 73.0% | 52.1%, (1, 4096): 91.8% | 91.8%.
# kept with the weight, 8192 in pieces of 1024: 80.4%, fp32 4096 of 1024: 57.4%.
COSTS["fused_add_rms_norm"] = Cost(
    {2: 44.1, 4: 26.1},
    {2: 70.1, 4: 50.1},
    kept=(
        Kept({2: 8.2, 4: 16.1}, {2: 62.3, 4: 30.0}),
        Kept({2: 8.2, 4: 16.1}, {2: 58.4, 4: 30.0}, weights=True),
    ),
)
# whole (1, 4096): 87.6% | 79.2%. wide (1, 2048): 46.0% | 46.0%, (1, 4096): 91.8% | 91.8%.
# kept, 8192 with everything in pieces of 1024: 87.6%, 16384 with x alone of 512: 85.5%.
COSTS["rms_norm_backward"] = Cost(
    {2: 42.2, 4: 38.1},
    {2: 44.2, 4: 44.2},
    kept=(
        Kept({2: 4.1, 4: 8.1}, {2: 72.4, 4: 72.9}),
        Kept({2: 8.1, 4: 16.1}, {2: 64.8, 4: 65.3}),
        Kept({2: 8.1, 4: 16.1}, {2: 56.3, 4: 57.0}, weights=True),
    ),
)
# whole and wide: as above. kept: 8192 with everything in pieces of 512: 75.1%, 16384 with x
# alone of 512: 87.6%.
COSTS["add_rms_norm_backward"] = Cost({2: 42.2, 4: 38.1}, {2: 44.2, 4: 44.2}, kept=_KEPT_WITH_DS)
# Without dweight. whole (1, 4096): 95.9% | 83.4%. wide and kept: as above.
COSTS["add_rms_norm_backward_dx"] = Cost({2: 46.1, 4: 40.1}, {2: 44.2, 4: 44.2}, kept=_KEPT_WITH_DS)


@triton.jit
def _load(x_ptr, residual_ptr, start, offsets, mask, dtype: tl.constexpr):
    """Load x, or x + residual, in the dtype of the result."""
    x = load(x_ptr + start, offsets, mask)
    if residual_ptr is not None:
        x += load(residual_ptr + start, offsets, mask)
    return x.to(dtype)


@triton.jit
def _piece(x_row, residual_row, col, dtype: tl.constexpr, SIZE: tl.constexpr):
    """Return a piece of x, or of x + residual, from kept rows, in the dtype of the result."""
    x = piece(x_row, col, SIZE)
    if residual_row is not None:
        x += piece(residual_row, col, SIZE)
    return x.to(dtype)


@triton.jit(do_not_specialize=["M", "tokens"])
def _rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, scale_ptr, shift_ptr, y_ptr, s_ptr, M, N, tokens, eps, offset,
    CASTING_MODE: tl.constexpr, ROUNDS: tl.constexpr, BY_ROW: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    rows, cols, offsets = tile_offsets(N, BLOCK_M, BLOCK_N)
    weight = None
    if weight_ptr is not None:
        weight = load(weight_ptr, cols, cols < N)
    for tile in tl.range(tl.program_id(0).to(tl.int64), tl.cdiv(M, BLOCK_M), tl.num_programs(0)):
        row = tile * BLOCK_M
        start = row * N
        mask = (rows < remaining(M, row, BLOCK_M)) & (cols < N)
        s = _load(x_ptr, residual_ptr, start, offsets, mask, dtype)
        if residual_ptr is not None:
            tl.store(s_ptr + start + offsets, s, mask=mask)
        x = s.to(tl.float32)
        sum_of_squares = tl.sum(rms_square(x, dtype, CASTING_MODE), axis=1)[:, None]
        rstd = rms_rstd(sum_of_squares, N, eps, dtype, CASTING_MODE)
        y = rms_scaled(x, rstd, weight, offset, dtype, CASTING_MODE)
        if scale_ptr is not None:
            if BY_ROW:
                y = modulated_tile(y, scale_ptr, shift_ptr, start + offsets, mask, dtype, ROUNDS)
            else:
                first = row // tokens * N + cols
                y = modulated_tile(y, scale_ptr, shift_ptr, first, cols < N, dtype, ROUNDS)
        tl.store(y_ptr + start + offsets, y.to(dtype), mask=mask)


@triton.jit(do_not_specialize=["M", "tokens"])
def _rms_norm_wide_kernel(
    x_ptr, residual_ptr, weight_ptr, scale_ptr, shift_ptr, y_ptr, s_ptr, M, N, tokens, eps, offset,
    CASTING_MODE: tl.constexpr, ROUNDS: tl.constexpr, BY_ROW: tl.constexpr,
    ROW: tl.constexpr, KEPT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # The second pass takes the rows from the buffer if they are kept, and else finds them in the L2
    # cache. It adds the residual again, because reading s back would have to wait for the store.
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    rows, cols, offsets = tile_offsets(N, BLOCK_M, BLOCK_N)
    weight_row = None
    if KEPT > 1 and weight_ptr is not None:
        weight_row = kept_row(weight_ptr, N, ROW)
    for tile in tl.range(tl.program_id(0).to(tl.int64), tl.cdiv(M, BLOCK_M), tl.num_programs(0)):
        row = tile * BLOCK_M
        row_mask = rows < remaining(M, row, BLOCK_M)
        if KEPT:
            x_row = kept_row(x_ptr + row * N, N, ROW)
            residual_row = None
            if residual_ptr is not None:
                residual_row = kept_row(residual_ptr + row * N, N, ROW)
        squares = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for col in tl.range(0, N, BLOCK_N):
            start = row * N + col
            if KEPT:
                s = _piece(x_row, residual_row, col, dtype, BLOCK_N)
            else:
                mask = row_mask & (cols < remaining(N, col, BLOCK_N))
                s = _load(x_ptr, residual_ptr, start, offsets, mask, dtype)
            squares += rms_square(s.to(tl.float32), dtype, CASTING_MODE)
        rstd = rms_rstd(tl.sum(squares, axis=1)[:, None], N, eps, dtype, CASTING_MODE)
        for col in tl.range(0, N, BLOCK_N):
            start = row * N + col
            mask = row_mask & (cols < remaining(N, col, BLOCK_N))
            if KEPT:
                s = _piece(x_row, residual_row, col, dtype, BLOCK_N)
            else:
                s = _load(x_ptr, residual_ptr, start, offsets, mask, dtype)
            if residual_ptr is not None:
                tl.store(s_ptr + start + offsets, s, mask=mask)
            x = s.to(tl.float32)
            weight = None
            if weight_ptr is not None:
                weight = kept_or_loaded(weight_row, weight_ptr, N, col, BLOCK_N)
            y = rms_scaled(x, rstd, weight, offset, dtype, CASTING_MODE)
            if scale_ptr is not None:
                if BY_ROW:
                    place = start + offsets
                    y = modulated_tile(y, scale_ptr, shift_ptr, place, mask, dtype, ROUNDS)
                else:
                    place = row // tokens * N + col + cols
                    inside = cols < remaining(N, col, BLOCK_N)
                    y = modulated_tile(y, scale_ptr, shift_ptr, place, inside, dtype, ROUNDS)
            tl.store(y_ptr + start + offsets, y.to(dtype), mask=mask)


@triton.jit
def _backward_of_rows(
    dy_ptr, ds_ptr, x_ptr, weight_ptr, dx_ptr, dweight_ptr, dbias_ptr,
    M, N, first, split, splits, part, eps, offset,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # Compute every splits-th tile of the M rows from `first` on. The program's sums are the row
    # `part` of the partial sums dweight and dbias.
    rows, cols, offsets = tile_offsets(N, BLOCK_M, BLOCK_N)
    if weight_ptr is not None:
        weight = load(weight_ptr, cols, cols < N) + offset
    if dweight_ptr is not None:
        dweight = tl.zeros((1, BLOCK_N), tl.float32)
    if dbias_ptr is not None:
        dbias = tl.zeros((1, BLOCK_N), tl.float32)
    for tile in tl.range(split, tl.cdiv(M, BLOCK_M), splits):
        row = tile * BLOCK_M
        start = (first + row) * N
        left = remaining(M, row, BLOCK_M)
        mask = (rows < left) & (cols < N)
        x = load(x_ptr + start, offsets, mask)
        dy = load(dy_ptr + start, offsets, mask)
        mean_square = tl.sum(x * x, axis=1)[:, None] / N
        if BLOCK_M > 1:
            # Rows past M are zeros, which eps = 0 would turn into 0 * inf in dweight.
            mean_square += 1.0 - within(rows, left)
        rstd = tl.rsqrt(mean_square + eps)
        xhat = x * rstd
        product = dy * xhat
        if dweight_ptr is not None:
            dweight += tl.sum(product, axis=0)[None, :]
        if dbias_ptr is not None:
            dbias += tl.sum(dy, axis=0)[None, :]
        if dx_ptr is not None:
            g = dy
            if weight_ptr is not None:
                g = dy * weight
            # The same sum in two orders of multiplication. Share of the buffer at (1, 4096), bf16
            # and fp32: with ds the first order takes 83% and 79%, the second 83% and 92%; without
            # ds the first takes 96% and 83%, the second 88% and 75%.
            if ds_ptr is not None:
                product = g * xhat
            elif weight_ptr is not None:
                product = product * weight
            projection = tl.sum(product, axis=1)[:, None] / N
            dx = (g - xhat * projection) * rstd
            if ds_ptr is not None:
                dx += load(ds_ptr + start, offsets, mask)
            tl.store(dx_ptr + start + offsets, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    sums = part * N
    if dweight_ptr is not None:
        tl.store(dweight_ptr + sums + cols, dweight, mask=cols < N)
    if dbias_ptr is not None:
        tl.store(dbias_ptr + sums + cols, dbias, mask=cols < N)


@triton.jit(do_not_specialize=["M", "samples", "splits"])
def _rms_norm_backward_kernel(
    dy_ptr, ds_ptr, x_ptr, weight_ptr, dx_ptr, dweight_ptr, dbias_ptr,
    M, N, samples, splits, eps, offset,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    if samples is None:
        _backward_of_rows(
            dy_ptr, ds_ptr, x_ptr, weight_ptr, dx_ptr, dweight_ptr, dbias_ptr,
            M, N, 0, program, tl.num_programs(0), program, eps, offset, BLOCK_M, BLOCK_N,
        )  # fmt: skip
    else:
        for item in tl.range(program, samples * splits, tl.num_programs(0)):
            sample = item % samples
            _backward_of_rows(
                dy_ptr, ds_ptr, x_ptr, weight_ptr + sample * N, dx_ptr, dweight_ptr, dbias_ptr,
                M, N, sample * M, item // samples, splits, item, eps, offset, BLOCK_M, BLOCK_N,
            )  # fmt: skip


@triton.jit(do_not_specialize=["M", "tokens"])
def _rms_norm_statistics_kernel(
    dy_ptr, x_ptr, weight_ptr, scale_ptr, rstd_ptr, projection_ptr, M, N, tokens, eps, offset,
    NEEDS_DX: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # rstd, and mean(g * xhat) if NEEDS_DX, of each row. With samples, `tokens` rows share a row of
    # weight.
    rows, cols, offsets = tile_offsets(N, BLOCK_M, BLOCK_N)
    for tile in tl.range(tl.program_id(0).to(tl.int64), tl.cdiv(M, BLOCK_M), tl.num_programs(0)):
        row = tile * BLOCK_M
        row_mask = rows < remaining(M, row, BLOCK_M)
        first = 0
        if tokens is not None:
            first = row // tokens * N
        squares = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        products = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for col in tl.range(0, N, BLOCK_N):
            start = row * N + col
            col_mask = cols < remaining(N, col, BLOCK_N)
            x = load(x_ptr + start, offsets, row_mask & col_mask)
            squares += x * x
            if NEEDS_DX:
                g = load(dy_ptr + start, offsets, row_mask & col_mask)
                if weight_ptr is not None:
                    g *= load(weight_ptr + first + col, cols, col_mask) + offset
                if scale_ptr is not None:
                    g *= load(scale_ptr + start, offsets, row_mask & col_mask) + 1.0
                products += g * x
        rstd = tl.rsqrt(tl.sum(squares, axis=1)[:, None] / N + eps)
        tl.store(rstd_ptr + row + rows, rstd, mask=row_mask)
        if NEEDS_DX:
            projection = tl.sum(products, axis=1)[:, None] / N * rstd
            tl.store(projection_ptr + row + rows, projection, mask=row_mask)


def launch_rms_norm(
    call: Any, residual: Tensor | None, y: Tensor, s: Tensor | None, plan: Plan | None,
    modulation: Modulation = PLAIN,
) -> None:  # fmt: skip
    """Launch the forward into y, and into s if there is a residual: s is x + residual."""
    x, residual, weight = tiling.rows(call.x), tiling.rows(residual), contiguous(call.weight)
    M, N = x.shape
    if plan is None:
        op = "rms_norm_none" if call.casting_mode == "none" else "rms_norm"
        if residual is not None:
            op = "fused_add_rms_norm"
        if modulation.scale is not None:
            op = "modulated_rms_norm"
        plan = tiling.plan(op, N, x, residual, *modulation[:2], weights=(weight,))
    plan, by_row = plan_modulation(plan, x, modulation)
    launch_rows(
        (_rms_norm_kernel, _rms_norm_wide_kernel), plan,
        x, residual, weight, modulation.scale, modulation.shift, y, s,
        M, N, modulation.tokens, call.eps, call.offset,
        CASTING_MODE=rms_mode(call.casting_mode), ROUNDS=modulation.rounds, BY_ROW=by_row,
    )  # fmt: skip


def launch_rms_norm_backward(norm: NormBackward, forced: Plan | None) -> None:
    """Launch the backward. `forced` replaces the plan of every kernel."""
    (M, N), numbers = norm.x.shape, (norm.eps, norm.offset)
    plan = norm.plan("rms_norm", forced)
    if plan.KEPT:
        launch_kept_backward(norm, plan, centred=False)
        return
    if plan.BLOCK_N < N or norm.token is not None:
        rstd, projection = norm.x.new_empty((2, M), dtype=torch.float32)
        plan = within_samples(plan, norm.samples > 1)
        launch(
            _rms_norm_statistics_kernel, plan, cdiv(M, plan.BLOCK_M),
            norm.dy, norm.x, norm.weight, norm.scale, rstd, projection,
            M, N, norm.rows_of_weight, *numbers,
            NEEDS_DX=norm.dx is not None,
        )  # fmt: skip
        statistics = norm_backward.NormStatistics(rstd=rstd, projection=projection)
        norm_backward.launch_wide_backward(norm, statistics, forced)
        return
    splits = norm.splits(plan)
    tensors = (norm.dy, norm.ds, norm.x, norm.weight, norm.dx)
    sizes = (norm.tokens, N, *norm.items(splits))
    arguments = (plan, splits * norm.samples, splits, tensors, *sizes, *numbers)
    norm.launch(_rms_norm_backward_kernel, *arguments)


register("npu", launch_rms_norm, launch_rms_norm_backward, NormBackward, tiling.rows)
