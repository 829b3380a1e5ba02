"""The backward of rms_norm and layer_norm for rows too wide for a tile.

It is given the statistics of every row; the rest is elementwise. A program owns a chunk of columns,
goes down the rows, and keeps the columns' weight gradients in the Unified Buffer.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from ..sizes import cdiv
from . import tiling
from .partial_sums import partial_sums, summed
from .tile import load, remaining, tile_offsets
from .tiling import COSTS, Cost, Plan, launch


@dataclass(frozen=True)
class Statistics:
    """Statistics of whole rows, (M,) float32 each.

    projection is mean(g * xhat). mean and mean_g are None for rms_norm, which subtracts no mean.
    """

    rstd: Tensor
    projection: Tensor
    mean: Tensor | None = None
    mean_g: Tensor | None = None


COSTS.update(
    {
        # (1, 2048): 54.3% | 50.1%, (1, 4096): 91.8% | overflow.
        "wide_backward": Cost({}, {2: 52.2, 4: 52.2}),
    }
)


@triton.jit(do_not_specialize=["M", "splits"])
def _wide_backward_kernel(
    dy_ptr, ds_ptr, x_ptr, weight_ptr, mean_ptr, rstd_ptr,
    mean_g_ptr, projection_ptr, dx_ptr, dweight_ptr, dbias_ptr,
    M, N, splits, offset,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    rows, cols, offsets = tile_offsets(N, BLOCK_M, BLOCK_N)
    # A work item is a chunk of columns and a split: every splits-th tile of rows.
    program = tl.program_id(0).to(tl.int64)
    for item in tl.range(program, tl.cdiv(N, BLOCK_N) * splits, tl.num_programs(0)):
        split = item % splits
        col = (item // splits) * BLOCK_N
        col_mask = cols < remaining(N, col, BLOCK_N)
        if weight_ptr is not None:
            weight = load(weight_ptr + col, cols, col_mask) + offset
        if dweight_ptr is not None:
            dweight = tl.zeros((1, BLOCK_N), tl.float32)
        if dbias_ptr is not None:
            dbias = tl.zeros((1, BLOCK_N), tl.float32)
        for tile in tl.range(split, tl.cdiv(M, BLOCK_M), splits):
            row = tile * BLOCK_M
            row_mask = rows < remaining(M, row, BLOCK_M)
            mask = row_mask & col_mask
            start = row * N + col
            rstd = load(rstd_ptr + row, rows, row_mask)
            x = load(x_ptr + start, offsets, mask)
            dy = load(dy_ptr + start, offsets, mask)
            if mean_ptr is not None:
                x -= load(mean_ptr + row, rows, row_mask)
            xhat = x * rstd
            if dweight_ptr is not None:
                dweight += tl.sum(dy * xhat, axis=0)[None, :]
            if dbias_ptr is not None:
                dbias += tl.sum(dy, axis=0)[None, :]
            if dx_ptr is not None:
                g = dy
                if weight_ptr is not None:
                    g = dy * weight
                if mean_ptr is not None:
                    g -= load(mean_g_ptr + row, rows, row_mask)
                dx = rstd * (g - xhat * load(projection_ptr + row, rows, row_mask))
                if ds_ptr is not None:
                    dx += load(ds_ptr + start, offsets, mask)
                tl.store(dx_ptr + start + offsets, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        sums = split * N + col
        if dweight_ptr is not None:
            tl.store(dweight_ptr + sums + cols, dweight, mask=col_mask)
        if dbias_ptr is not None:
            tl.store(dbias_ptr + sums + cols, dbias, mask=col_mask)


def launch_wide_backward(
    dy: Tensor, ds: Tensor | None, x: Tensor, weight: Tensor | None,
    dx: Tensor | None, dweight: Tensor | None, dbias: Tensor | None,
    offset: float, statistics: Statistics, plan: Plan | None,
) -> None:  # fmt: skip
    M, N = x.shape
    plan = plan or tiling.plan("wide_backward", N, x, dy)
    chunks = cdiv(N, plan.BLOCK_N)
    splits = plan.splits(cdiv(M, plan.BLOCK_M), chunks)
    dweights = partial_sums(dweight, splits)
    dbiases = partial_sums(dbias, splits)
    launch(
        _wide_backward_kernel, plan, chunks * splits,
        dy, ds, x, weight, statistics.mean, statistics.rstd,
        statistics.mean_g, statistics.projection, dx, dweights, dbiases,
        M, N, splits, offset,
    )  # fmt: skip
    summed(dweights, dweight)
    summed(dbiases, dbias)
