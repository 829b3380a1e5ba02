"""layer_norm. M rows, N columns."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...common.norms.layer_norm import register
from ...common.norms.modulation import PLAIN, Modulation
from ...common.tensors import cdiv, contiguous
from .. import tiling
from ..tile import lane_counts, lanes_merged, lanes_updated, load, remaining, tile_offsets, within
from ..tiling import COSTS, Cost, Kept, Plan, launch
from . import norm_backward
from .modulation import modulated_tile, plan_modulation, within_samples
from .norm_backward import NormBackward, launch_kept_backward
from .resident_rows import kept_mean, kept_or_loaded, kept_row, piece

# whole (1, 4096): 66.9% | 50.1%, padded 75.2% | 58.5%. wide (1, 2048): 89.7% | 85.6%.
# kept with the weights, 16384 in pieces of 1024: 87.6%, fp32 8192 of 1024: 85.5%.
COSTS["layer_norm"] = Cost(
    {2: 32.2, 4: 24.2},
    {2: 86.2, 4: 82.2},
    padding=4,
    kept=(
        Kept({2: 4.1, 4: 8.1}, {2: 48.3, 4: 44.2}, padding=8.2),
        Kept({2: 4.1, 4: 8.1}, {2: 40.2, 4: 36.2}, weights=True, padding=8.2),
    ),
)
# whole (1, 4096): 83.5% | 71.0%, padded 91.8% | 79.3%. wide (1, 1024): 47.1%,
# (1, 2048): 94.0%. kept, 8192 with x and dy in pieces of 512: 88.7%, 16384 with x alone
# and one gradient of a weight of 512: 89.7%.
COSTS["layer_norm_backward"] = Cost(
    {2: 40.2, 4: 34.2},
    {2: 90.3, 4: 90.3},
    padding=4,
    kept=(
        Kept({2: 4.02, 4: 8.03}, {2: 87.8, 4: 88.3}, padding=8.2),
        Kept({2: 8.1, 4: 16.1}, {2: 84.5, 4: 80.6}, padding=8.2),
        Kept({2: 8.1, 4: 16.1}, {2: 76.9, 4: 64.8}, weights=True, padding=8.2),
    ),
)


@triton.jit
def _standardised(x, inside, N, eps, PADDED: tl.constexpr):
    """Return xhat and rstd of whole rows; `inside` is 1.0 for the columns of the row, else 0.0."""
    centred = x - tl.sum(x, axis=1)[:, None] / N
    if PADDED:
        # Columns beyond the row are -mean now, and would count in the variance.
        centred = centred * inside
    rstd = tl.rsqrt(tl.sum(centred * centred, axis=1)[:, None] / N + eps)
    return centred * rstd, rstd


@triton.jit(do_not_specialize=["M", "tokens"])
def _layer_norm_kernel(
    x_ptr, weight_ptr, bias_ptr, scale_ptr, shift_ptr, y_ptr, M, N, tokens, eps,
    PADDED: tl.constexpr, ROUNDS: tl.constexpr, BY_ROW: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    rows, cols, offsets = tile_offsets(N, BLOCK_M, BLOCK_N)
    inside = within(cols, N)
    if weight_ptr is not None:
        weight = load(weight_ptr, cols, cols < N)
    if bias_ptr is not None:
        bias = load(bias_ptr, cols, cols < N)
    for tile in tl.range(tl.program_id(0).to(tl.int64), tl.cdiv(M, BLOCK_M), tl.num_programs(0)):
        row = tile * BLOCK_M
        start = row * N
        mask = (rows < remaining(M, row, BLOCK_M)) & (cols < N)
        y, _ = _standardised(load(x_ptr + start, offsets, mask), inside, N, eps, PADDED)
        if weight_ptr is not None:
            y = y * weight
        if bias_ptr is not None:
            y = y + bias
        if scale_ptr is not None:
            if BY_ROW:
                y = modulated_tile(y, scale_ptr, shift_ptr, start + offsets, mask, dtype, ROUNDS)
            else:
                first = row // tokens * N + cols
                y = modulated_tile(y, scale_ptr, shift_ptr, first, cols < N, dtype, ROUNDS)
        tl.store(y_ptr + start + offsets, y.to(dtype), mask=mask)


@triton.jit
def _kept_statistics(x_row, N, eps, PADDED: tl.constexpr, SIZE: tl.constexpr):
    """Return the mean of a kept row, and rstd, the reciprocal of its deviation."""
    cols = tl.arange(0, SIZE)[None, :]
    mean = kept_mean(x_row, N, SIZE)
    squares = tl.zeros((1, SIZE), tl.float32)
    for col in tl.range(0, N, SIZE):
        x = piece(x_row, col, SIZE) - mean
        if PADDED:
            x *= within(cols, remaining(N, col, SIZE))
        squares += x * x
    return mean, tl.rsqrt(tl.sum(squares, axis=1)[:, None] / N + eps)


@triton.jit(do_not_specialize=["M", "tokens"])
def _layer_norm_wide_kernel(
    x_ptr, weight_ptr, bias_ptr, scale_ptr, shift_ptr, y_ptr, M, N, tokens, eps,
    PADDED: tl.constexpr, ROUNDS: tl.constexpr, BY_ROW: tl.constexpr,
    ROW: tl.constexpr, KEPT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # The last pass takes the rows from the buffer if they are kept, and else finds them in the L2
    # cache. Kept rows take two passes for the statistics; other rows are read once for them, by
    # Welford's algorithm in each lane.
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    rows, cols, offsets = tile_offsets(N, BLOCK_M, BLOCK_N)
    counts = lane_counts(cols, N, BLOCK_N)
    weight_row = None
    if KEPT > 1 and weight_ptr is not None:
        weight_row = kept_row(weight_ptr, N, ROW)
    bias_row = None
    if KEPT > 1 and bias_ptr is not None:
        bias_row = kept_row(bias_ptr, N, ROW)
    for tile in tl.range(tl.program_id(0).to(tl.int64), tl.cdiv(M, BLOCK_M), tl.num_programs(0)):
        row = tile * BLOCK_M
        row_mask = rows < remaining(M, row, BLOCK_M)
        if KEPT:
            x_row = kept_row(x_ptr + row * N, N, ROW)
            mean, rstd = _kept_statistics(x_row, N, eps, PADDED, BLOCK_N)
        else:
            lane_mean = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            m2 = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            for chunk in tl.range(0, tl.cdiv(N, BLOCK_N)):
                col = chunk * BLOCK_N
                left = remaining(N, col, BLOCK_N)
                x = load(x_ptr + row * N + col, offsets, row_mask & (cols < left))
                lane_mean, m2 = lanes_updated(x, within(cols, left), chunk + 1, lane_mean, m2)
            mean, _, rest, squares = lanes_merged(lane_mean, m2, counts, N)
            mean += rest
            rstd = tl.rsqrt(squares / N + eps)
        for col in tl.range(0, N, BLOCK_N):
            start = row * N + col
            mask = row_mask & (cols < remaining(N, col, BLOCK_N))
            if KEPT:
                x = piece(x_row, col, BLOCK_N)
            else:
                x = load(x_ptr + start, offsets, mask)
            y = (x - mean) * rstd
            if weight_ptr is not None:
                y = y * kept_or_loaded(weight_row, weight_ptr, N, col, BLOCK_N)
            if bias_ptr is not None:
                y = y + kept_or_loaded(bias_row, bias_ptr, N, col, BLOCK_N)
            if scale_ptr is not None:
                if BY_ROW:
                    place = start + offsets
                    y = modulated_tile(y, scale_ptr, shift_ptr, place, mask, dtype, ROUNDS)
                else:
                    place = row // tokens * N + col + cols
                    left = cols < remaining(N, col, BLOCK_N)
                    y = modulated_tile(y, scale_ptr, shift_ptr, place, left, dtype, ROUNDS)
            tl.store(y_ptr + start + offsets, y.to(dtype), mask=mask)


@triton.jit
def _backward_of_rows(
    dy_ptr, x_ptr, weight_ptr, dx_ptr, dweight_ptr, dbias_ptr,
    M, N, first, split, splits, part, eps,
    PADDED: tl.constexpr, REUSES_PRODUCT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # Compute every splits-th tile of the M rows from `first` on. The program's sums are the row
    # `part` of the partial sums dweight and dbias.
    rows, cols, offsets = tile_offsets(N, BLOCK_M, BLOCK_N)
    inside = within(cols, N)
    if weight_ptr is not None:
        weight = load(weight_ptr, cols, cols < N)
    if dweight_ptr is not None:
        dweight = tl.zeros((1, BLOCK_N), tl.float32)
    if dbias_ptr is not None:
        dbias = tl.zeros((1, BLOCK_N), tl.float32)
    for tile in tl.range(split, tl.cdiv(M, BLOCK_M), splits):
        row = tile * BLOCK_M
        start = (first + row) * N
        left = remaining(M, row, BLOCK_M)
        mask = (rows < left) & (cols < N)
        dy = load(dy_ptr + start, offsets, mask)
        if dbias_ptr is not None:
            dbias += tl.sum(dy, axis=0)[None, :]
        if dx_ptr is not None or dweight_ptr is not None:
            x = load(x_ptr + start, offsets, mask)
            # Rows past M are zeros, which eps = 0 would turn into 0 * inf in dweight.
            past = 1.0 - within(rows, left)
            xhat, rstd = _standardised(x, inside, N, eps + past, PADDED)
            product = dy * xhat
            if dweight_ptr is not None:
                dweight += tl.sum(product, axis=0)[None, :]
            if dx_ptr is not None:
                g = dy
                if weight_ptr is not None:
                    g = dy * weight
                    # The same sum in two orders of multiplication. Share of the buffer at (1, 4096)
                    # without dbias, first order and second: 83% and 92% for fp32 rows that fill the
                    # tile, 92% and 71% for fp32 rows that do not, 96% and 75% for bf16.
                    if REUSES_PRODUCT:
                        product = product * weight
                    else:
                        product = g * xhat
                mean_g = tl.sum(g, axis=1)[:, None] / N
                projection = tl.sum(product, axis=1)[:, None] / N
                dx = (g - mean_g - xhat * projection) * rstd
                tl.store(dx_ptr + start + offsets, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    sums = part * N
    if dweight_ptr is not None:
        tl.store(dweight_ptr + sums + cols, dweight, mask=cols < N)
    if dbias_ptr is not None:
        tl.store(dbias_ptr + sums + cols, dbias, mask=cols < N)


@triton.jit(do_not_specialize=["M", "samples", "splits"])
def _layer_norm_backward_kernel(
    dy_ptr, x_ptr, weight_ptr, dx_ptr, dweight_ptr, dbias_ptr, M, N, samples, splits, eps,
    PADDED: tl.constexpr, REUSES_PRODUCT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    if samples is None:
        _backward_of_rows(
            dy_ptr, x_ptr, weight_ptr, dx_ptr, dweight_ptr, dbias_ptr,
            M, N, 0, program, tl.num_programs(0), program, eps,
            PADDED, REUSES_PRODUCT, BLOCK_M, BLOCK_N,
        )  # fmt: skip
    else:
        for item in tl.range(program, samples * splits, tl.num_programs(0)):
            sample = item % samples
            _backward_of_rows(
                dy_ptr, x_ptr, weight_ptr + sample * N, dx_ptr, dweight_ptr, dbias_ptr,
                M, N, sample * M, item // samples, splits, item, eps,
                PADDED, REUSES_PRODUCT, BLOCK_M, BLOCK_N,
            )  # fmt: skip


@triton.jit(do_not_specialize=["M", "tokens"])
def _layer_norm_statistics_kernel(
    dy_ptr, x_ptr, weight_ptr, scale_ptr, mean_ptr, rstd_ptr, mean_g_ptr, projection_ptr,
    M, N, tokens, eps,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # One pass: each lane keeps the sum of g * (x - its running mean), and corrects it whenever that
    # mean changes.
    rows, cols, offsets = tile_offsets(N, BLOCK_M, BLOCK_N)
    counts = lane_counts(cols, N, BLOCK_N)
    for tile in tl.range(tl.program_id(0).to(tl.int64), tl.cdiv(M, BLOCK_M), tl.num_programs(0)):
        row = tile * BLOCK_M
        row_mask = rows < remaining(M, row, BLOCK_M)
        first = 0
        if tokens is not None:
            first = row // tokens * N
        lane_mean = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        m2 = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        sum_g = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        product = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for chunk in tl.range(0, tl.cdiv(N, BLOCK_N)):
            col = chunk * BLOCK_N
            start = row * N + col
            left = remaining(N, col, BLOCK_N)
            mask = row_mask & (cols < left)
            x = load(x_ptr + start, offsets, mask)
            g = load(dy_ptr + start, offsets, mask)
            if weight_ptr is not None:
                g = g * load(weight_ptr + first + col, cols, cols < left)
            if scale_ptr is not None:
                g = g * (load(scale_ptr + start, offsets, mask) + 1.0)
            before = lane_mean
            lane_mean, m2 = lanes_updated(x, within(cols, left), chunk + 1, lane_mean, m2)
            product += g * (x - lane_mean) - sum_g * (lane_mean - before)
            sum_g += g
        mean, deviation, rest, squares = lanes_merged(lane_mean, m2, counts, N)
        rstd = tl.rsqrt(squares / N + eps)
        mean_g = tl.sum(sum_g, axis=1)[:, None] / N
        mean_gx = tl.sum(product + sum_g * deviation, axis=1)[:, None] / N
        projection = (mean_gx - mean_g * rest) * rstd
        tl.store(mean_ptr + row + rows, mean + rest, mask=row_mask)
        tl.store(rstd_ptr + row + rows, rstd, mask=row_mask)
        tl.store(mean_g_ptr + row + rows, mean_g, mask=row_mask)
        tl.store(projection_ptr + row + rows, projection, mask=row_mask)


def launch_layer_norm(
    call: Any, y: Tensor, plan: Plan | None, modulation: Modulation = PLAIN
) -> None:
    """Launch the forward into y."""
    x = tiling.rows(call.x)
    weight, bias = contiguous(call.weight), contiguous(call.bias)
    M, N = x.shape
    if plan is None:
        op = "layer_norm" if modulation.scale is None else "modulated_layer_norm"
        plan = tiling.plan(op, N, x, *modulation[:2], weights=(weight, bias))
    plan, by_row = plan_modulation(plan, x, modulation)
    arguments = (
        plan, cdiv(M, plan.BLOCK_M),
        x, weight, bias, modulation.scale, modulation.shift, y,
        M, N, modulation.tokens, call.eps,
    )  # fmt: skip
    constants = {"ROUNDS": modulation.rounds, "BY_ROW": by_row}
    if plan.BLOCK_N >= N:
        launch(_layer_norm_kernel, *arguments, PADDED=plan.BLOCK_N > N, **constants)
    else:
        constants |= {"PADDED": N % plan.BLOCK_N != 0, "ROW": plan.ROW, "KEPT": plan.KEPT}
        launch(_layer_norm_wide_kernel, *arguments, **constants)


def launch_layer_norm_backward(norm: NormBackward, forced: Plan | None) -> None:
    """Launch the backward. `forced` replaces the plan of every kernel."""
    x, (M, N) = norm.x, norm.x.shape
    plan = norm.plan("layer_norm", forced)
    if plan.KEPT:
        launch_kept_backward(norm, plan, centred=True)
        return
    if plan.BLOCK_N < N or norm.token is not None:
        mean, rstd, mean_g, projection = x.new_empty((4, M), dtype=torch.float32)
        plan = within_samples(plan, norm.samples > 1)
        launch(
            _layer_norm_statistics_kernel, plan, cdiv(M, plan.BLOCK_M),
            norm.dy, x, norm.weight, norm.scale, mean, rstd, mean_g, projection,
            M, N, norm.rows_of_weight, norm.eps,
        )  # fmt: skip
        statistics = norm_backward.NormStatistics(rstd, projection, mean, mean_g)
        norm_backward.launch_wide_backward(norm, statistics, forced)
        return
    splits = norm.splits(plan)
    norm.launch(
        _layer_norm_backward_kernel, plan, splits * norm.samples, splits,
        (norm.dy, x, norm.weight, norm.dx),
        norm.tokens, N, *norm.items(splits), norm.eps,
        PADDED=plan.BLOCK_N > N, REUSES_PRODUCT=plan.BLOCK_N == N and x.element_size() > 2,
    )  # fmt: skip


register("npu", launch_layer_norm, launch_layer_norm_backward, NormBackward, tiling.rows)
