"""The backward of gated_rms_norm by two kernels, for rows too wide for one program.

The first kernel computes the statistics of every row's groups. The rest is elementwise: a program
of the second owns a tile of columns, goes down the rows, and keeps the sums of its columns.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ....common.norms.gated_norm_math import gated_norm_gradients, gated_norm_terms
from ....common.sizes import cdiv
from ...launch import launch
from ..norm_backward_two_kernel import OWNED_COLUMNS, TwoKernel


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
