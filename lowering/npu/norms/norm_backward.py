"""The backward of rms_norm and layer_norm: the arguments that all its kernels share, and the
kernels for rows that stay in the Unified Buffer, and for rows too wide for a tile.

A row that stays is kept in its own dtype. A program keeps the sums of its rows' weight gradients, a
line for each piece of a row. Level 1 keeps x, level 2 also dy, and level 3 also the weight; the
rest is read in each pass.

The statistics of rows too wide for a tile are computed before, by a kernel of the norm's file; the
rest is elementwise. A program owns a chunk of columns, goes down the rows, and keeps the columns'
weight gradients in the Unified Buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ...common.norms.backward import NormArguments
from ...common.tensors import cdiv
from .. import tiling
from ..partial_sums import partial_sums, summed
from ..tile import load, remaining, tile_offsets, within
from ..tiling import COSTS, Cost, Plan, launch
from .resident_rows import kept_mean, kept_or_loaded, kept_row, line, line_added, piece


class NormBackward(NormArguments):
    """The arguments of the backward of a norm on an NPU. All tensors are contiguous."""

    @property
    def scale(self) -> Tensor | None:
        """The scale of each row's modulation, if each has its own."""
        return None if self.token is None else self.token.scale

    def plan(self, norm: str, forced: Plan | None) -> Plan:
        """Return the plan for the backward of this norm, or the forced one.

        The kernel for kept rows has no samples and no modulations: a forced plan with kept rows
        loses them there, and no modulated entry of COSTS has any.
        """
        if forced is not None:
            several = self.samples > 1 or self.token is not None
            return replace(forced, KEPT=0) if several else forced
        op = f"{norm}_backward"
        if self.is_modulated:
            op = f"modulated_{norm}_{'backward' if self.token is None else 'statistics'}"
        elif self.ds is not None:
            op = f"add_{op}" if self.dweight is not None else f"add_{op}_dx"
        gradients = (self.dweight, self.dbias)
        tensors = (self.x, self.dy, self.scale)
        N = self.x.shape[1]
        return tiling.plan(op, N, *tensors, weights=(self.weight,), gradients=gradients)

    def splits(self, plan: Plan) -> int:
        """Return how many programs share the rows of a sample, so that every core has work."""
        tiles = cdiv(self.tokens, plan.BLOCK_M)
        return max(1, min(tiles, plan.cores // self.samples))

    def items(self, splits: int) -> tuple[int | None, int | None]:
        """Return the numbers of samples and splits as kernels take them.

        Both are None for one sample: a program then has one work item, and the kernel no loop.
        """
        return (None, None) if self.samples == 1 else (self.samples, splits)

    def launch(
        self, kernel: Any, plan: Plan, tiles: int, parts: int, tensors: Sequence[Tensor | None],
        *numbers: float | None, **constants: Any,
    ) -> None:  # fmt: skip
        """Launch a kernel that stores `parts` partial sums of dweight and dbias, and sum these."""
        dweights, dbiases = partial_sums(self.dweight, parts), partial_sums(self.dbias, parts)
        launch(kernel, plan, tiles, *tensors, dweights, dbiases, *numbers, **constants)
        summed(dweights, self.dweight)
        summed(dbiases, self.dbias)


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


@dataclass(frozen=True)
class NormStatistics:
    """Statistics of whole rows, (M,) float32 each.

    g is the gradient of xhat: dy times the weight and the modulation. projection is mean(g * xhat).
    mean and mean_g are None for rms_norm, which subtracts no mean.
    """

    rstd: Tensor
    projection: Tensor
    mean: Tensor | None = None
    mean_g: Tensor | None = None


# (1, 2048): 54.3% | 50.1%, (1, 4096): 91.8% | overflow.
COSTS["wide_backward"] = Cost({}, {2: 52.2, 4: 52.2})


@triton.jit(do_not_specialize=["M", "samples", "splits"])
def _wide_backward_kernel(
    dy_ptr, ds_ptr, x_ptr, weight_ptr, bias_ptr, scale_ptr, mean_ptr, rstd_ptr,
    mean_g_ptr, projection_ptr, dx_ptr, dscale_ptr, dweight_ptr, dbias_ptr,
    M, N, samples, splits, offset,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    rows, cols, offsets = tile_offsets(N, BLOCK_M, BLOCK_N)
    # A work item is a chunk of columns, a sample, and a split: every splits-th tile of its rows.
    program = tl.program_id(0).to(tl.int64)
    # M is the rows of a sample. Items count the chunks slowest, then the splits, then the samples,
    # so that the partial sums are rows of (splits, samples, N).
    parts = splits
    if samples is not None:
        parts = splits * samples
    for item in tl.range(program, tl.cdiv(N, BLOCK_N) * parts, tl.num_programs(0)):
        part = item % parts
        split = part
        first = 0
        weight_row = 0
        if samples is not None:
            split = part // samples
            first = part % samples * M
            weight_row = part % samples * N
        col = (item // parts) * BLOCK_N
        col_mask = cols < remaining(N, col, BLOCK_N)
        if weight_ptr is not None:
            weight = load(weight_ptr + weight_row + col, cols, col_mask) + offset
        if bias_ptr is not None:
            bias = load(bias_ptr + col, cols, col_mask)
        if dweight_ptr is not None:
            dweight = tl.zeros((1, BLOCK_N), tl.float32)
        if dbias_ptr is not None:
            dbias = tl.zeros((1, BLOCK_N), tl.float32)
        for tile in tl.range(split, tl.cdiv(M, BLOCK_M), splits):
            row = tile * BLOCK_M
            row_mask = rows < remaining(M, row, BLOCK_M)
            mask = row_mask & col_mask
            place = first + row
            start = place * N + col
            rstd = load(rstd_ptr + place, rows, row_mask)
            x = load(x_ptr + start, offsets, mask)
            dy = load(dy_ptr + start, offsets, mask)
            if mean_ptr is not None:
                x -= load(mean_ptr + place, rows, row_mask)
            xhat = x * rstd
            if dscale_ptr is not None:
                # dscale is dy times the norm's result, which is computed again.
                y = xhat
                if weight_ptr is not None:
                    y = y * weight
                if bias_ptr is not None:
                    y = y + bias
                dscale = (dy * y).to(dscale_ptr.dtype.element_ty)
                tl.store(dscale_ptr + start + offsets, dscale, mask=mask)
            if scale_ptr is not None:
                dy *= load(scale_ptr + start, offsets, mask) + 1.0
            if dweight_ptr is not None:
                dweight += tl.sum(dy * xhat, axis=0)[None, :]
            if dbias_ptr is not None:
                dbias += tl.sum(dy, axis=0)[None, :]
            if dx_ptr is not None:
                g = dy
                if weight_ptr is not None:
                    g = dy * weight
                if mean_ptr is not None:
                    g -= load(mean_g_ptr + place, rows, row_mask)
                dx = rstd * (g - xhat * load(projection_ptr + place, rows, row_mask))
                if ds_ptr is not None:
                    dx += load(ds_ptr + start, offsets, mask)
                tl.store(dx_ptr + start + offsets, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        sums = part * N + col
        if dweight_ptr is not None:
            tl.store(dweight_ptr + sums + cols, dweight, mask=col_mask)
        if dbias_ptr is not None:
            tl.store(dbias_ptr + sums + cols, dbias, mask=col_mask)


def launch_wide_backward(norm: NormBackward, statistics: NormStatistics, plan: Plan | None) -> None:
    """Launch the elementwise part of the backward of a norm for wide or modulated rows."""
    N = norm.x.shape[1]
    op = "wide_backward" if norm.token is None else "modulated_columns"
    plan = plan or tiling.plan(op, N, norm.x, norm.dy, norm.scale)
    chunks = cdiv(N, plan.BLOCK_N) * norm.samples
    splits = plan.splits(cdiv(norm.tokens, plan.BLOCK_M), chunks)
    scale, dscale, bias = norm.token or (None, None, None)
    samples, _ = norm.items(splits)
    tensors = (
        norm.dy, norm.ds, norm.x, norm.weight, bias, scale, statistics.mean, statistics.rstd,
        statistics.mean_g, statistics.projection, norm.dx, dscale,
    )  # fmt: skip
    numbers = (norm.tokens, N, samples, splits, norm.offset)
    norm.launch(_wide_backward_kernel, plan, chunks * splits, splits, tensors, *numbers)
