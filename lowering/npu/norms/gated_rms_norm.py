"""gated_rms_norm. Each of `groups` groups of N columns is a norm of M rows by itself.

A work item is a group and a split, every splits-th tile of rows. s is the input of the norm: x if
NORM_FIRST, else x times the activated gate.

Groups of columns too wide for a tile have a backward of two kernels. The first computes the
statistics of every group of a row. The rest is elementwise: a program of the second owns a chunk of
columns, goes down the rows, and keeps the columns' weight gradients in the Unified Buffer.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .... import library
from ...common.norms.norm_math import (
    gate_factor,
    gated_norm_gradients,
    gated_norm_result,
    gated_norm_terms,
)
from ...common.tensors import cdiv, contiguous
from .. import tiling
from ..partial_sums import partial_sums, summed
from ..tile import load, remaining, within
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


# whole (1, 4096): 87.6% | 70.9%. wide (1, 2048): 68.8% | 56.3%.
COSTS["gated_rms_norm"] = Cost({2: 43.1, 4: 43.1}, {2: 60.1, 4: 60.1})
# whole (1, 1024): 48.0% | 48.0%. wide, the statistics, (1, 2048): 58.5% | 58.5%.
COSTS["gated_rms_norm_backward"] = Cost({2: 86.1, 4: 86.1}, {2: 86.1, 4: 86.1})


@triton.jit(do_not_specialize=["M", "splits"])
def _gated_rms_norm_kernel(
    x_ptr, gate_ptr, weight_ptr, y_ptr, M, N, groups, splits, eps,
    NORM_FIRST: tl.constexpr, ACTIVATION: tl.constexpr, CASTING_MODE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    rows = tl.arange(0, BLOCK_M)[:, None]
    cols = tl.arange(0, BLOCK_N)[None, :]
    offsets = rows * (N * groups) + cols
    for item in tl.range(tl.program_id(0).to(tl.int64), groups * splits, tl.num_programs(0)):
        first = item // splits * N
        weight = None
        if weight_ptr is not None:
            weight = tl.load(weight_ptr + first + cols, mask=cols < N, other=0.0)
        for tile in tl.range(item % splits, tl.cdiv(M, BLOCK_M), splits):
            row = tile * BLOCK_M
            start = row * N * groups + first
            mask = (rows < remaining(M, row, BLOCK_M)) & (cols < N)
            s = load(x_ptr + start, offsets, mask)
            gate = load(gate_ptr + start, offsets, mask)
            if not NORM_FIRST:
                s *= gate_factor(gate, ACTIVATION)
            rstd = tl.rsqrt(tl.sum(s * s, axis=1)[:, None] / N + eps)
            y = gated_norm_result(
                s, rstd, weight, gate, dtype, NORM_FIRST, ACTIVATION, CASTING_MODE
            )
            tl.store(y_ptr + start + offsets, y.to(dtype), mask=mask)


@triton.jit(do_not_specialize=["M", "splits"])
def _gated_rms_norm_wide_kernel(
    x_ptr, gate_ptr, weight_ptr, y_ptr, M, N, groups, splits, eps,
    NORM_FIRST: tl.constexpr, ACTIVATION: tl.constexpr, CASTING_MODE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # The second pass finds the row in the L2 cache.
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    rows = tl.arange(0, BLOCK_M)[:, None]
    cols = tl.arange(0, BLOCK_N)[None, :]
    offsets = rows * (N * groups) + cols
    for item in tl.range(tl.program_id(0).to(tl.int64), groups * splits, tl.num_programs(0)):
        first = item // splits * N
        for tile in tl.range(item % splits, tl.cdiv(M, BLOCK_M), splits):
            row = tile * BLOCK_M
            row_mask = rows < remaining(M, row, BLOCK_M)
            start = row * N * groups + first
            squares = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            for col in tl.range(0, N, BLOCK_N):
                mask = row_mask & (cols < remaining(N, col, BLOCK_N))
                s = load(x_ptr + start + col, offsets, mask)
                if not NORM_FIRST:
                    s *= gate_factor(load(gate_ptr + start + col, offsets, mask), ACTIVATION)
                squares += s * s
            rstd = tl.rsqrt(tl.sum(squares, axis=1)[:, None] / N + eps)
            for col in tl.range(0, N, BLOCK_N):
                col_mask = cols < remaining(N, col, BLOCK_N)
                mask = row_mask & col_mask
                s = load(x_ptr + start + col, offsets, mask)
                gate = load(gate_ptr + start + col, offsets, mask)
                if not NORM_FIRST:
                    s *= gate_factor(gate, ACTIVATION)
                weight = None
                if weight_ptr is not None:
                    weight = tl.load(weight_ptr + first + col + cols, mask=col_mask, other=0.0)
                y = gated_norm_result(
                    s, rstd, weight, gate, dtype, NORM_FIRST, ACTIVATION, CASTING_MODE
                )
                tl.store(y_ptr + start + col + offsets, y.to(dtype), mask=mask)


@triton.jit(do_not_specialize=["M", "splits"])
def _gated_rms_norm_backward_kernel(
    dy_ptr, x_ptr, gate_ptr, weight_ptr, dx_ptr, dgate_ptr, dweight_ptr, M, N, groups, splits, eps,
    NORM_FIRST: tl.constexpr, ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    rows = tl.arange(0, BLOCK_M)[:, None]
    cols = tl.arange(0, BLOCK_N)[None, :]
    offsets = rows * (N * groups) + cols
    for item in tl.range(tl.program_id(0).to(tl.int64), groups * splits, tl.num_programs(0)):
        first = item // splits * N
        weight = None
        if weight_ptr is not None:
            weight = load(weight_ptr + first, cols, cols < N)
        if dweight_ptr is not None:
            dweight = tl.zeros((1, BLOCK_N), tl.float32)
        for tile in tl.range(item % splits, tl.cdiv(M, BLOCK_M), splits):
            row = tile * BLOCK_M
            start = row * N * groups + first
            left = remaining(M, row, BLOCK_M)
            mask = (rows < left) & (cols < N)
            dy = load(dy_ptr + start, offsets, mask)
            x = load(x_ptr + start, offsets, mask)
            gate = load(gate_ptr + start, offsets, mask)
            s, g = gated_norm_terms(dy, x, gate, weight, NORM_FIRST, ACTIVATION)
            mean_square = tl.sum(s * s, axis=1)[:, None] / N
            if BLOCK_M > 1:
                # Rows past M are zeros, which eps = 0 would turn into 0 * inf in dweight.
                mean_square += 1.0 - within(rows, left)
            rstd = tl.rsqrt(mean_square + eps)
            projection = tl.sum(g * s, axis=1)[:, None] / N * rstd
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
            sums = (item % splits) * N * groups + first
            tl.store(dweight_ptr + sums + cols, dweight, mask=cols < N)


def _sizes(call: Any, x: Tensor) -> tuple[int, int, int]:
    """Return the numbers of rows, of columns in a group, and of groups."""
    N = x.shape[1] if call.group_size is None else int(call.group_size)
    return x.shape[0], N, x.shape[1] // N


def _splits(plan: Plan, tiles: int, groups: int) -> int:
    """Return the number of splits of the rows: as many as there are cores for each group."""
    return max(1, min(tiles, plan.cores // groups))


@library.kernel("gated_rms_norm", "npu")
def gated_rms_norm(call: Any, y: Tensor, plan: Plan | None) -> None:
    x, gate, weight = tiling.rows(call.x), tiling.rows(call.gate), contiguous(call.weight)
    M, N, groups = _sizes(call, x)
    plan = plan or tiling.plan("gated_rms_norm", N, x, gate)
    splits = _splits(plan, cdiv(M, plan.BLOCK_M), groups)
    launch(
        _gated_rms_norm_kernel if plan.whole(N) else _gated_rms_norm_wide_kernel,
        plan, groups * splits,
        x, gate, weight, y,
        M, N, groups, splits, call.eps,
        NORM_FIRST=call.norm_before_gate, ACTIVATION=call.activation,
        CASTING_MODE=call.casting_mode,
    )  # fmt: skip


@library.kernel("gated_rms_norm_backward", "npu")
def gated_rms_norm_backward(
    call: Any, dx: Tensor | None, dgate: Tensor | None, dweight: Tensor | None, plan: Plan | None
) -> None:
    inputs = (*map(tiling.rows, (call.dy, call.x, call.gate)), contiguous(call.weight))
    dy, x, gate, _ = inputs
    M, N, groups = _sizes(call, x)
    forced = plan
    plan = plan or tiling.plan("gated_rms_norm_backward", N, dy, x, gate)
    constants = {"NORM_FIRST": call.norm_before_gate, "ACTIVATION": call.activation}
    if not plan.whole(N):
        sizes = (M, N, groups, call.eps)
        launch_wide_backward(inputs, (dx, dgate, dweight), sizes, constants, plan, forced)
        return
    splits = _splits(plan, cdiv(M, plan.BLOCK_M), groups)
    partial = partial_sums(dweight, splits)
    launch(
        _gated_rms_norm_backward_kernel, plan, groups * splits,
        *inputs, dx, dgate, partial,
        M, N, groups, splits, call.eps,
        **constants,
    )  # fmt: skip
    summed(partial, dweight)
