"""The backward of rms_norm and layer_norm by two kernels, for rows too wide for one program.

The first kernel computes the statistics of every row. The rest is elementwise: a program of the
second owns a tile of columns, goes down the rows, and keeps the sums of its columns in registers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...common.tensors import cdiv
from ...common.triton_math import folded
from ..launch import Plan, launch, pipeline_stages, processors
from ..sums import first_mean, mean_and_rstd, store_column_sums
from .norm_backward import NormBackward, launch_norm_backward


@triton.jit(do_not_specialize=["M", "tokens"])
def rms_norm_statistics_kernel(
    dy_ptr, x_ptr, weight_ptr, scale_ptr, rstd_ptr, projection_ptr,
    M, N, tokens, stride_dy, stride_x, stride_scale, eps, offset,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    # Compute each row's rstd and mean(g * xhat), the projection of g on xhat.
    row = tl.program_id(0).to(tl.int64)
    if tokens is not None:
        weight_ptr += row // tokens * N
    squares = tl.zeros((BLOCK_N,), tl.float32)
    products = tl.zeros((BLOCK_N,), tl.float32)
    for start in range(0, N, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        mask = cols < N
        x = tl.load(x_ptr + row * stride_x + cols, mask=mask, other=0.0).to(tl.float32)
        g = tl.load(dy_ptr + row * stride_dy + cols, mask=mask, other=0.0).to(tl.float32)
        if weight_ptr is not None:
            g *= tl.load(weight_ptr + cols, mask=mask, other=0.0).to(tl.float32) + offset
        if scale_ptr is not None:
            place = scale_ptr + row * stride_scale + cols
            g *= tl.load(place, mask=mask, other=0.0).to(tl.float32) + 1.0
        squares += x * x
        products += g * x
    rstd = tl.rsqrt(tl.sum(squares, 0) / N + eps)
    tl.store(rstd_ptr + row, rstd)
    tl.store(projection_ptr + row, tl.sum(products, 0) * rstd / N)


@triton.jit(do_not_specialize=["M", "tokens"])
def layer_norm_statistics_kernel(
    dy_ptr, x_ptr, weight_ptr, scale_ptr, statistics_ptr,
    M, N, tokens, stride_dy, stride_x, stride_scale, eps,
    BLOCK_N: tl.constexpr, FOLD: tl.constexpr,
):  # fmt: skip
    # Compute each row's mean, rstd, mean(g) and mean(g * xhat), in one pass. The sums are of
    # x - shift: a sum of x**2 would lose its precision where the mean is large.
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * stride_x
    dy_ptr += row * stride_dy
    if tokens is not None:
        weight_ptr += row // tokens * N
    shift = first_mean(x_ptr, N, BLOCK_N)
    sums = tl.zeros((BLOCK_N // FOLD,), tl.float32)
    squares = tl.zeros((BLOCK_N // FOLD,), tl.float32)
    sums_g = tl.zeros((BLOCK_N // FOLD,), tl.float32)
    products = tl.zeros((BLOCK_N // FOLD,), tl.float32)
    for start in range(0, N, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        mask = cols < N
        x = tl.load(x_ptr + cols, mask=mask, other=0.0).to(tl.float32)
        g = tl.load(dy_ptr + cols, mask=mask, other=0.0).to(tl.float32)
        if weight_ptr is not None:
            g *= tl.load(weight_ptr + cols, mask=mask, other=0.0).to(tl.float32)
        if scale_ptr is not None:
            place = scale_ptr + row * stride_scale + cols
            g *= tl.load(place, mask=mask, other=0.0).to(tl.float32) + 1.0
        x = tl.where(mask, x - shift, 0.0)
        sums += folded(x, FOLD)
        squares += folded(x * x, FOLD)
        sums_g += folded(g, FOLD)
        products += folded(g * x, FOLD)
    mean, rstd, step = mean_and_rstd(tl.sum(sums, 0), tl.sum(squares, 0), shift, N, eps)
    mean_g = tl.sum(sums_g, 0) / N
    tl.store(statistics_ptr + row, mean)
    # M is int32, and 3 * M may be beyond it.
    tl.store(statistics_ptr + M.to(tl.int64) + row, rstd)
    tl.store(statistics_ptr + 2 * M.to(tl.int64) + row, mean_g)
    projection = (tl.sum(products, 0) / N - step * mean_g) * rstd
    tl.store(statistics_ptr + 3 * M.to(tl.int64) + row, projection)


@triton.jit(do_not_specialize=["M", "samples"])
def two_kernel_backward_kernel(
    dy_ptr, ds_ptr, x_ptr, weight_ptr, mean_ptr, rstd_ptr, mean_g_ptr, projection_ptr,
    bias_ptr, scale_ptr, dscale_ptr, dx_ptr, dweight_ptr, dbias_ptr,
    M, N, samples, stride_dy, stride_ds, stride_x, stride_scale, offset,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    # A program has a chunk of columns of one sample, and is `group` among those that share its
    # rows. `part` is its row of partial sums.
    chunk = tl.program_id(0)
    group = tl.program_id(1).to(tl.int64)
    part = group
    if samples is not None:
        sample = (chunk % samples).to(tl.int64)
        chunk = chunk // samples
        part = group * samples + sample
        dy_ptr += sample * M * stride_dy
        x_ptr += sample * M * stride_x
        rstd_ptr += sample * M
        projection_ptr += sample * M
        if mean_ptr is not None:
            mean_ptr += sample * M
        if mean_g_ptr is not None:
            mean_g_ptr += sample * M
        weight_ptr += sample * N
        if dx_ptr is not None:
            dx_ptr += sample * M * N
    cols = chunk * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + cols, mask=cols < N, other=0.0).to(tl.float32) + offset
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
    dweight = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    dbias = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    # The rows that the first kernel read last come first: they may still be in the L2 cache.
    tiles = tl.cdiv(M, BLOCK_M)
    for tile in tl.range(group, tiles, tl.num_programs(1), num_stages=NUM_STAGES):
        rows = ((tiles - 1 - tile) * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
        mask = (rows < M) & (cols < N)
        rstd = tl.load(rstd_ptr + rows, mask=rows < M, other=0.0)
        x = tl.load(x_ptr + rows * stride_x + cols, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + rows * stride_dy + cols, mask=mask, other=0.0).to(tl.float32)
        if mean_ptr is not None:
            x -= tl.load(mean_ptr + rows, mask=rows < M, other=0.0)
        xhat = x * rstd
        if dscale_ptr is not None:
            y = xhat
            if weight_ptr is not None:
                y = y * weight
            if bias_ptr is not None:
                y = y + bias
            dscale = (dy * y).to(dscale_ptr.dtype.element_ty)
            tl.store(dscale_ptr + rows * N + cols, dscale, mask=mask)
        if scale_ptr is not None:
            place = scale_ptr + rows * stride_scale + cols
            dy *= tl.load(place, mask=mask, other=0.0).to(tl.float32) + 1.0
        if dweight_ptr is not None:
            dweight += dy * xhat
        if dbias_ptr is not None:
            dbias += dy
        if dx_ptr is not None:
            g = dy
            if weight_ptr is not None:
                g = dy * weight
            if mean_ptr is not None:
                g -= tl.load(mean_g_ptr + rows, mask=rows < M, other=0.0)
            dx = rstd * (g - xhat * tl.load(projection_ptr + rows, mask=rows < M, other=0.0))
            if ds_ptr is not None:
                dx += tl.load(ds_ptr + rows * stride_ds + cols, mask=mask, other=0.0).to(tl.float32)
            tl.store(dx_ptr + rows * N + cols, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    if dweight_ptr is not None:
        store_column_sums(dweight_ptr, dweight, part, cols, N)
    if dbias_ptr is not None:
        store_column_sums(dbias_ptr, dbias, part, cols, N)


# A program of the second kernel owns OWNED_COLUMNS columns, and takes OWNED_ROWS rows at a time. A
# 4096 x 32768 backward of rms_norm takes 0.325 ms, and 0.330 ms without prefetch and with twice the
# programs.
OWNED_COLUMNS = 1024
OWNED_ROWS = 4


@dataclass(frozen=True)
class TwoKernel(Plan):
    """Two kernels, one for the rows' statistics. BLOCK_N and threads are the first kernel's; the
    second has `programs` programs for each chunk of columns."""

    programs: int = 1
    BLOCK_M: int = OWNED_ROWS
    num_stages: int = 1


def plan_two_kernels(x: Tensor) -> TwoKernel:
    """Plan two programs a multiprocessor in all."""
    M, N = x.shape
    groups = max(1, 2 * processors(x) // cdiv(N, OWNED_COLUMNS))
    num_stages = pipeline_stages(x, 3 * OWNED_ROWS * OWNED_COLUMNS * x.element_size())
    return TwoKernel(2048, 256, min(cdiv(M, OWNED_ROWS), groups), num_stages=num_stages)


def launch_two_kernels(plan: TwoKernel, norm: NormBackward) -> None:
    columns = min(OWNED_COLUMNS, plan.BLOCK_N)
    scale, dscale, bias = norm.token or (None, None, None)
    launch_norm_backward(
        two_kernel_backward_kernel, plan.programs, norm,
        (norm.dy, norm.ds, norm.x, norm.weight, *_statistics(plan, norm), bias, scale, dscale),
        (*norm.strides, norm.stride_scale, norm.offset),
        chunks=cdiv(norm.x.shape[1], columns),
        BLOCK_M=plan.BLOCK_M, BLOCK_N=columns, NUM_STAGES=plan.num_stages, num_warps=4,
    )  # fmt: skip


def _statistics(plan: TwoKernel, norm: NormBackward) -> tuple[Tensor | None, ...]:
    """Compute each row's mean, rstd, mean(g) and mean(g * xhat), (M,) float32; those that rms_norm
    does not use are None."""
    M, N = norm.x.shape
    stride_dy, _, stride_x = norm.strides
    scale = None if norm.token is None else norm.token.scale
    inputs = (norm.dy, norm.x, norm.weight, scale)
    sizes = (M, N, norm.rows_of_weight, stride_dy, stride_x, norm.stride_scale, norm.eps)
    options = {"BLOCK_N": plan.BLOCK_N, "num_warps": plan.num_warps}
    if norm.has_mean:
        statistics = norm.x.new_empty((4, M), dtype=torch.float32)
        fold = min(8, plan.BLOCK_N)
        kernel = layer_norm_statistics_kernel
        launch(kernel, (M,), norm.x, *inputs, statistics, *sizes, FOLD=fold, **options)
        return statistics.unbind()
    rstd, projection = norm.x.new_empty((2, M), dtype=torch.float32)
    outputs = (rstd, projection)
    kernel = rms_norm_statistics_kernel
    launch(kernel, (M,), norm.x, *inputs, *outputs, *sizes, norm.offset, **options)
    return None, rstd, None, projection
