"""The backward of rms_norm and layer_norm for rows too wide for a tile.

The statistics of every row are computed before, by a kernel of the norm's file; the rest is
elementwise. A program owns a chunk of columns, goes down the rows, and keeps the columns' weight
gradients in the Unified Buffer.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from ...common.sizes import cdiv
from .. import tiling
from ..tile import load, remaining, tile_offsets
from ..tiling import COSTS, Cost, Plan
from .norm_backward import NormBackward


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
