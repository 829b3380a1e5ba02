"""gated_rms_norm. Each of `groups` groups of N columns is a norm of M rows by itself.

Whole rows: a program reads a group of columns of its rows once. Two passes: it reads a group of its
row twice. Rows too wide for one program have a backward of two kernels. The first computes the
statistics of every row's groups. The rest is elementwise: a program of the second owns a tile of
columns, goes down the rows, and keeps the sums of its columns.
"""

from __future__ import annotations

from dataclasses import replace
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
from ...common.tensors import cdiv, contiguous, next_power_of_2
from ...common.triton_math import folded, to_float32_again
from ..launch import Plan, TwoPass, WholeRow, launch, plan_whole_rows, rows
from ..sums import partial_sums, summed, two_row_sums
from .norm_backward import plan_whole_rows_backward
from .norm_backward_two_kernel import OWNED_COLUMNS, TwoKernel, plan_two_kernels
from .rms_norm import plan_two_pass


@triton.jit(do_not_specialize=["M"])
def gated_rms_norm_kernel(
    x_ptr, gate_ptr, weight_ptr, y_ptr, M, N, groups, stride_x, stride_gate, eps,
    NORM_FIRST: tl.constexpr, ACTIVATION: tl.constexpr, CASTING_MODE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    program = tl.program_id(0).to(tl.int64)
    rows = (program // groups * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
    cols = tl.arange(0, BLOCK_N)[None, :]
    # The mask is of columns within the group, the offsets are of columns of x.
    mask = (rows < M) & (cols < N)
    cols += program % groups * N
    x = tl.load(x_ptr + rows * stride_x + cols, mask=mask, other=0.0)
    gate = tl.load(gate_ptr + rows * stride_gate + cols, mask=mask, other=0.0)
    s = x.to(tl.float32)
    if not NORM_FIRST:
        s *= gate_factor(gate.to(tl.float32), ACTIVATION)
    rstd = tl.rsqrt(tl.sum(s * s, 1)[:, None] / N + eps)
    # The row stays in registers in its own dtype, and the weight is loaded after the sum.
    weight = None
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + cols, mask=tl.arange(0, BLOCK_N)[None, :] < N, other=0.0)
    s = to_float32_again(x)
    gate = to_float32_again(gate)
    if not NORM_FIRST:
        s *= gate_factor(gate, ACTIVATION)
    y = gated_norm_result(s, rstd, weight, gate, dtype, NORM_FIRST, ACTIVATION, CASTING_MODE)
    tl.store(y_ptr + rows * N * groups + cols, y.to(dtype), mask=mask)


@triton.jit(do_not_specialize=["M"])
def gated_rms_norm_backward_kernel(
    dy_ptr, x_ptr, gate_ptr, weight_ptr, dx_ptr, dgate_ptr, dweight_ptr,
    M, N, groups, stride_dy, stride_x, stride_gate, eps,
    NORM_FIRST: tl.constexpr, ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    # A program has the group program_id(0). `within` are columns within it, `cols` those of x.
    program = tl.program_id(1).to(tl.int64)
    within = tl.arange(0, BLOCK_N)[None, :]
    cols = tl.program_id(0).to(tl.int64) * N + within
    weight = None
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + cols, mask=within < N, other=0.0).to(tl.float32)
    dweight = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in tl.range(
        program * BLOCK_M, M, tl.num_programs(1) * BLOCK_M, num_stages=NUM_STAGES
    ):
        rows = (start + tl.arange(0, BLOCK_M))[:, None]
        mask = (rows < M) & (within < N)
        x = tl.load(x_ptr + rows * stride_x + cols, mask=mask, other=0.0)
        gate = tl.load(gate_ptr + rows * stride_gate + cols, mask=mask, other=0.0)
        dy = tl.load(dy_ptr + rows * stride_dy + cols, mask=mask, other=0.0)
        s, g = gated_norm_terms(
            dy.to(tl.float32), x.to(tl.float32), gate.to(tl.float32), weight, NORM_FIRST, ACTIVATION
        )
        squares, products = two_row_sums(s * s, g * s)
        mean_square = squares / N
        if BLOCK_M > 1:
            # Rows past M are zeros, which eps = 0 would turn into 0 * inf in dweight.
            mean_square = tl.where(rows < M, mean_square, 1.0)
        rstd = tl.rsqrt(mean_square + eps)
        dx, dgate, product = gated_norm_gradients(
            to_float32_again(dy), to_float32_again(x), to_float32_again(gate), weight,
            rstd, products / N * rstd, NORM_FIRST, ACTIVATION,
        )  # fmt: skip
        out = rows * N * tl.num_programs(0) + cols
        if dweight_ptr is not None:
            dweight += product
        if dx_ptr is not None:
            tl.store(dx_ptr + out, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        if dgate_ptr is not None:
            tl.store(dgate_ptr + out, dgate.to(dgate_ptr.dtype.element_ty), mask=mask)
    if dweight_ptr is not None:
        sums = tl.sum(dweight, 0)[None, :]
        tl.store(dweight_ptr + program * N * tl.num_programs(0) + cols, sums, mask=within < N)


def launch_whole_rows(
    plan: WholeRow, tensors: tuple[Any, ...], sizes: tuple[Any, ...], constants: dict[str, Any]
) -> None:
    M, _, groups, *_ = sizes
    launch(
        gated_rms_norm_kernel, (cdiv(M, plan.BLOCK_M) * groups,), tensors[0],
        *tensors, *sizes,
        **constants, BLOCK_M=plan.BLOCK_M, BLOCK_N=plan.BLOCK_N, num_warps=plan.num_warps,
    )  # fmt: skip


def launch_whole_row_gradients(
    plan: WholeRow, tensors: tuple[Any, ...], sizes: tuple[Any, ...], constants: dict[str, Any]
) -> None:
    launch(
        gated_rms_norm_backward_kernel, (sizes[2], plan.programs), tensors[0],
        *tensors, *sizes,
        **constants, BLOCK_M=plan.BLOCK_M, BLOCK_N=plan.BLOCK_N,
        NUM_STAGES=plan.num_stages, num_warps=plan.num_warps,
    )  # fmt: skip


@triton.jit(do_not_specialize=["M"])
def gated_rms_norm_two_pass_kernel(
    x_ptr, gate_ptr, weight_ptr, y_ptr, M, N, groups, stride_x, stride_gate, eps,
    NORM_FIRST: tl.constexpr, ACTIVATION: tl.constexpr, CASTING_MODE: tl.constexpr,
    BLOCK_N: tl.constexpr, TILES: tl.constexpr, FOLD: tl.constexpr,
):  # fmt: skip
    # A program has one group of one row; `first` is the group's first column. The first pass asks
    # the caches to keep the row, and the second goes backwards, so that it reads first what was
    # kept last.
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    program = tl.program_id(0).to(tl.int64)
    first = program % groups * N
    x_ptr += program // groups * stride_x + first
    gate_ptr += program // groups * stride_gate + first
    y_ptr += program * N
    sums = tl.zeros((BLOCK_N // FOLD,), tl.float32)
    for tile in tl.range(0, TILES, num_stages=1):
        cols = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        mask = cols < N
        s = tl.load(x_ptr + cols, mask=mask, other=0.0, eviction_policy="evict_last").to(tl.float32)
        if not NORM_FIRST:
            gate = tl.load(gate_ptr + cols, mask=mask, other=0.0, eviction_policy="evict_last")
            s *= gate_factor(gate.to(tl.float32), ACTIVATION)
        sums += folded(s * s, FOLD)
    rstd = tl.rsqrt(tl.sum(sums, 0) / N + eps)
    for done in tl.range(0, TILES, num_stages=1):
        cols = (TILES - 1 - done) * BLOCK_N + tl.arange(0, BLOCK_N)
        mask = cols < N
        s = tl.load(x_ptr + cols, mask=mask, other=0.0).to(tl.float32)
        gate = tl.load(gate_ptr + cols, mask=mask, other=0.0).to(tl.float32)
        if not NORM_FIRST:
            s *= gate_factor(gate, ACTIVATION)
        weight = None
        if weight_ptr is not None:
            weight = tl.load(weight_ptr + first + cols, mask=mask, other=0.0)
        y = gated_norm_result(s, rstd, weight, gate, dtype, NORM_FIRST, ACTIVATION, CASTING_MODE)
        tl.store(y_ptr + cols, y.to(dtype), mask=mask, cache_modifier=".cs")


def launch_two_pass(
    plan: TwoPass, tensors: tuple[Any, ...], sizes: tuple[Any, ...], constants: dict[str, Any]
) -> None:
    M, N, groups, *_ = sizes
    launch(
        gated_rms_norm_two_pass_kernel, (M * groups,), tensors[0],
        *tensors, *sizes,
        **constants, BLOCK_N=plan.BLOCK_N, TILES=cdiv(N, plan.BLOCK_N),
        # A thread writes 16 bytes at once.
        FOLD=min(plan.BLOCK_N, 16 // tensors[-1].element_size()),
        num_warps=plan.num_warps,
    )  # fmt: skip


@triton.jit(do_not_specialize=["M"])
def gated_rms_norm_statistics_kernel(
    dy_ptr, x_ptr, gate_ptr, weight_ptr, rstd_ptr, projection_ptr,
    M, N, groups, stride_dy, stride_x, stride_gate, eps,
    NORM_FIRST: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # Compute the rstd of a group of a row, and mean(g * shat), the projection of g on shat.
    program = tl.program_id(0).to(tl.int64)
    row = program // groups
    first = program % groups * N
    squares = tl.zeros((BLOCK_N,), tl.float32)
    products = tl.zeros((BLOCK_N,), tl.float32)
    for start in range(0, N, BLOCK_N):
        mask = start + tl.arange(0, BLOCK_N) < N
        cols = first + start + tl.arange(0, BLOCK_N)
        dy = tl.load(dy_ptr + row * stride_dy + cols, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + row * stride_x + cols, mask=mask, other=0.0).to(tl.float32)
        gate = tl.load(gate_ptr + row * stride_gate + cols, mask=mask, other=0.0).to(tl.float32)
        weight = None
        if weight_ptr is not None:
            weight = tl.load(weight_ptr + cols, mask=mask, other=0.0).to(tl.float32)
        s, g = gated_norm_terms(dy, x, gate, weight, NORM_FIRST, ACTIVATION)
        squares += s * s
        products += g * s
    rstd = tl.rsqrt(tl.sum(squares, 0) / N + eps)
    tl.store(rstd_ptr + program, rstd)
    tl.store(projection_ptr + program, tl.sum(products, 0) / N * rstd)


@triton.jit(do_not_specialize=["M"])
def gated_rms_norm_columns_kernel(
    dy_ptr, x_ptr, gate_ptr, weight_ptr, rstd_ptr, projection_ptr, dx_ptr, dgate_ptr, dweight_ptr,
    M, N, groups, stride_dy, stride_x, stride_gate,
    NORM_FIRST: tl.constexpr, ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    # A tile of columns lies within a group: `within` are its columns in the group, `cols` in x.
    chunks = tl.cdiv(N, BLOCK_N)
    group = tl.program_id(0) // chunks
    within = tl.program_id(0) % chunks * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    cols = group.to(tl.int64) * N + within
    program = tl.program_id(1).to(tl.int64)
    weight = None
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + cols, mask=within < N, other=0.0).to(tl.float32)
    dweight = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    # The rows that the first kernel read last come first: they may still be in the L2 cache.
    tiles = tl.cdiv(M, BLOCK_M)
    for tile in tl.range(program, tiles, tl.num_programs(1), num_stages=NUM_STAGES):
        rows = ((tiles - 1 - tile) * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
        mask = (rows < M) & (within < N)
        place = rows * groups + group
        rstd = tl.load(rstd_ptr + place, mask=rows < M, other=0.0)
        projection = tl.load(projection_ptr + place, mask=rows < M, other=0.0)
        dy = tl.load(dy_ptr + rows * stride_dy + cols, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + rows * stride_x + cols, mask=mask, other=0.0).to(tl.float32)
        gate = tl.load(gate_ptr + rows * stride_gate + cols, mask=mask, other=0.0).to(tl.float32)
        dx, dgate, product = gated_norm_gradients(
            dy, x, gate, weight, rstd, projection, NORM_FIRST, ACTIVATION
        )
        out = rows * N * groups + cols
        if dweight_ptr is not None:
            dweight += product
        if dx_ptr is not None:
            tl.store(dx_ptr + out, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        if dgate_ptr is not None:
            tl.store(dgate_ptr + out, dgate.to(dgate_ptr.dtype.element_ty), mask=mask)
    if dweight_ptr is not None:
        sums = tl.sum(dweight, 0)[None, :]
        tl.store(dweight_ptr + program * N * groups + cols, sums, mask=within < N)


def launch_two_kernels(
    plan: TwoKernel, tensors: tuple[Any, ...], sizes: tuple[Any, ...], constants: dict[str, Any]
) -> None:
    *inputs, dx, dgate, partial = tensors
    M, N, groups, *_ = sizes
    x = tensors[1]
    rstd, projection = x.new_empty((2, M * groups), dtype=torch.float32)
    launch(
        gated_rms_norm_statistics_kernel, (M * groups,), x,
        *inputs, rstd, projection, *sizes,
        **constants, BLOCK_N=plan.BLOCK_N, num_warps=plan.num_warps,
    )  # fmt: skip
    columns = min(OWNED_COLUMNS, plan.BLOCK_N)
    launch(
        gated_rms_norm_columns_kernel, (cdiv(N, columns) * groups, plan.programs), x,
        *inputs, rstd, projection, dx, dgate, partial, *sizes[:-1],
        **constants, BLOCK_M=plan.BLOCK_M, BLOCK_N=columns,
        NUM_STAGES=plan.num_stages, num_warps=4,
    )  # fmt: skip


# The plans are those of fused_add_rms_norm, which also reads two tensors. Shares of the H200's copy
# rate in bfloat16, forward and backward: (32768, 4096) 99% and 87%, (16384, 8192) 99% and 87%,
# (262144, 128) 89% and 75%.
def plan_forward(group: Tensor, gate: Tensor) -> WholeRow | TwoPass:
    N = group.shape[1]
    if N <= 16384:
        return plan_whole_rows(N, most_threads=256 if N <= 8192 else 512)
    return plan_two_pass(group, gate)


def plan_backward(x: Tensor, group: Tensor) -> WholeRow | TwoKernel:
    """Plan whole rows if a group fits in registers, else two kernels. `programs` are those of each
    group.

    Compiled for sm_90, rows of 4096 with 32 elements a thread spill 176 bytes, and with 16 none.
    """
    if next_power_of_2(group.shape[1]) <= 8192:
        plan = plan_whole_rows_backward(group, 3)
        threads = max(plan.threads, plan.BLOCK_M * plan.BLOCK_N // 16)
        programs = max(1, plan.programs // (x.shape[1] // group.shape[1]))
        return replace(plan, threads=threads, programs=programs)
    return plan_two_kernels(x)


def _constants(call: Any) -> dict[str, Any]:
    return {"NORM_FIRST": call.norm_before_gate, "ACTIVATION": call.activation}


def _group(call: Any, x: Tensor) -> Tensor:
    """Return the columns of the first group: all groups have its shape."""
    return x if call.group_size is None else x[:, : call.group_size]


@library.kernel("gated_rms_norm", "cuda")
def gated_rms_norm(call: Any, y: Tensor, plan: Plan | None) -> None:
    x, gate, weight = rows(call.x), rows(call.gate), contiguous(call.weight)
    group = _group(call, x)
    plan = plan or plan_forward(group, gate)
    M, N = group.shape
    sizes = (M, N, x.shape[1] // N, x.stride(0), gate.stride(0), call.eps)
    constants = {**_constants(call), "CASTING_MODE": call.casting_mode}
    launch_forward = launch_whole_rows if isinstance(plan, WholeRow) else launch_two_pass
    launch_forward(plan, (x, gate, weight, y), sizes, constants)


@library.kernel("gated_rms_norm_backward", "cuda")
def gated_rms_norm_backward(
    call: Any, dx: Tensor | None, dgate: Tensor | None, dweight: Tensor | None, plan: Plan | None
) -> None:
    dy, x, gate, weight = *map(rows, (call.dy, call.x, call.gate)), contiguous(call.weight)
    group = _group(call, x)
    plan = plan or plan_backward(x, group)
    M, N = group.shape
    partial = partial_sums(dweight, plan.programs)
    tensors = (dy, x, gate, weight, dx, dgate, partial)
    sizes = (M, N, x.shape[1] // N, *(tensor.stride(0) for tensor in (dy, x, gate)), call.eps)
    whole = isinstance(plan, WholeRow)
    launch_backward = launch_whole_row_gradients if whole else launch_two_kernels
    launch_backward(plan, tensors, sizes, _constants(call))
    summed((partial, dweight))
