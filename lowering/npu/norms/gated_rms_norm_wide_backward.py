"""The backward of gated_rms_norm for groups of columns too wide for a tile.

The first kernel computes the statistics of every group of a row. The rest is elementwise: a program
of the second kernel owns a chunk of columns, goes down the rows, and keeps the columns' weight
gradients in the Unified Buffer.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...common.norms.gated_norm_math import gated_norm_gradients, gated_norm_terms
from ...common.sizes import cdiv
from .. import tiling
from ..partial_sums import partial_sums, summed
from ..tile import load, remaining
from ..tiling import COSTS, Cost, Plan, launch

# (1, 2048): 83.4% | 79.2%.
COSTS["gated_rms_norm_columns"] = Cost({}, {2: 86.1, 4: 86.1})


@triton.jit(do_not_specialize=["M"])
def _gated_rms_norm_statistics_kernel(
    dy_ptr, x_ptr, gate_ptr, weight_ptr, rstd_ptr, projection_ptr, M, N, groups, eps,
    NORM_FIRST: tl.constexpr, ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # rstd and projection are (groups, M).
    rows = tl.arange(0, BLOCK_M)[:, None]
    cols = tl.arange(0, BLOCK_N)[None, :]
    offsets = rows * (N * groups) + cols
    tiles = tl.cdiv(M, BLOCK_M)
    for item in tl.range(tl.program_id(0).to(tl.int64), groups * tiles, tl.num_programs(0)):
        group = item // tiles
        row = item % tiles * BLOCK_M
        row_mask = rows < remaining(M, row, BLOCK_M)
        squares = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        products = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for col in tl.range(0, N, BLOCK_N):
            col_mask = cols < remaining(N, col, BLOCK_N)
            mask = row_mask & col_mask
            start = (row * groups + group) * N + col
            dy = load(dy_ptr + start, offsets, mask)
            x = load(x_ptr + start, offsets, mask)
            gate = load(gate_ptr + start, offsets, mask)
            weight = None
            if weight_ptr is not None:
                weight = load(weight_ptr + group * N + col, cols, col_mask)
            s, g = gated_norm_terms(dy, x, gate, weight, NORM_FIRST, ACTIVATION)
            squares += s * s
            products += g * s
        rstd = tl.rsqrt(tl.sum(squares, axis=1)[:, None] / N + eps)
        projection = tl.sum(products, axis=1)[:, None] / N * rstd
        place = group * M + row
        tl.store(rstd_ptr + place + rows, rstd, mask=row_mask)
        tl.store(projection_ptr + place + rows, projection, mask=row_mask)


@triton.jit(do_not_specialize=["M", "splits"])
def _gated_rms_norm_columns_kernel(
    dy_ptr, x_ptr, gate_ptr, weight_ptr, rstd_ptr, projection_ptr, dx_ptr, dgate_ptr, dweight_ptr,
    M, N, groups, splits,
    NORM_FIRST: tl.constexpr, ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    rows = tl.arange(0, BLOCK_M)[:, None]
    cols = tl.arange(0, BLOCK_N)[None, :]
    offsets = rows * (N * groups) + cols
    chunks = tl.cdiv(N, BLOCK_N)
    # A work item is a chunk of a group's columns and a split: every splits-th tile of rows.
    program = tl.program_id(0).to(tl.int64)
    for item in tl.range(program, groups * chunks * splits, tl.num_programs(0)):
        split = item % splits
        group = item // splits // chunks
        col = item // splits % chunks * BLOCK_N
        col_mask = cols < remaining(N, col, BLOCK_N)
        first = group * N + col
        weight = None
        if weight_ptr is not None:
            weight = load(weight_ptr + first, cols, col_mask)
        if dweight_ptr is not None:
            dweight = tl.zeros((1, BLOCK_N), tl.float32)
        for tile in tl.range(split, tl.cdiv(M, BLOCK_M), splits):
            row = tile * BLOCK_M
            row_mask = rows < remaining(M, row, BLOCK_M)
            mask = row_mask & col_mask
            start = row * N * groups + first
            place = group * M + row
            rstd = load(rstd_ptr + place, rows, row_mask)
            projection = load(projection_ptr + place, rows, row_mask)
            dy = load(dy_ptr + start, offsets, mask)
            x = load(x_ptr + start, offsets, mask)
            gate = load(gate_ptr + start, offsets, mask)
            dx, dgate, product = gated_norm_gradients(
                dy, x, gate, weight, rstd, projection, NORM_FIRST, ACTIVATION
            )
            if dweight_ptr is not None:
                dweight += tl.sum(product, axis=0)[None, :]
            if dx_ptr is not None:
                tl.store(dx_ptr + start + offsets, dx.to(dx_ptr.dtype.element_ty), mask=mask)
            if dgate_ptr is not None:
                tl.store(
                    dgate_ptr + start + offsets, dgate.to(dgate_ptr.dtype.element_ty), mask=mask
                )
        if dweight_ptr is not None:
            tl.store(dweight_ptr + split * N * groups + first + cols, dweight, mask=col_mask)


def launch_wide_backward(
    inputs: tuple[Tensor | None, ...], gradients: tuple[Tensor | None, ...],
    sizes: tuple[Any, ...], constants: dict[str, Any], plan: Plan, forced: Plan | None,
) -> None:  # fmt: skip
    """Launch both kernels; `plan` is for the statistics, and `forced`, if any, for both."""
    dy, x, gate, _ = inputs
    dx, dgate, dweight = gradients
    M, N, groups, eps = sizes
    assert x is not None
    rstd, projection = x.new_empty((2, groups * M), dtype=torch.float32)
    launch(
        _gated_rms_norm_statistics_kernel, plan, groups * cdiv(M, plan.BLOCK_M),
        *inputs, rstd, projection,
        M, N, groups, eps,
        **constants,
    )  # fmt: skip
    plan = forced or tiling.plan("gated_rms_norm_columns", N, dy, x, gate)
    chunks = groups * cdiv(N, plan.BLOCK_N)
    splits = plan.splits(cdiv(M, plan.BLOCK_M), chunks)
    partial = partial_sums(dweight, splits)
    launch(
        _gated_rms_norm_columns_kernel, plan, chunks * splits,
        *inputs, rstd, projection, dx, dgate, partial,
        M, N, groups, splits,
        **constants,
    )  # fmt: skip
    summed(partial, dweight)
