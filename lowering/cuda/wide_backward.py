"""The backward of rows too wide for one program, of rms_norm and layer_norm alike.

Once every row's statistics are known the rest is elementwise over (rows, columns): programs own a
tile of columns and walk rows, keeping the columns' weight gradients in registers.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from ..sizes import cdiv
from .launch import Plan, launch, pipeline_stages, processors
from .partial_sums import partial_sums, summed


@dataclass(frozen=True)
class Statistics:
    """What the whole row says about each of its elements, (M,) float32 each.

    projection is mean(g * xhat). mean and mean_g are layer_norm's; rms_norm subtracts no mean.
    """

    rstd: Tensor
    projection: Tensor
    mean: Tensor | None = None
    mean_g: Tensor | None = None


@triton.jit(do_not_specialize=["M"])
def _wide_backward_kernel(
    dy_ptr,
    ds_ptr,
    x_ptr,
    weight_ptr,
    mean_ptr,
    rstd_ptr,
    mean_g_ptr,
    projection_ptr,
    dx_ptr,
    dweight_ptr,
    dbias_ptr,
    M,
    N,
    stride_dy,
    stride_ds,
    stride_x,
    offset,
    HAS_DS: tl.constexpr,
    HAS_MEAN: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    NEEDS_DX: tl.constexpr,
    NEEDS_DWEIGHT: tl.constexpr,
    NEEDS_DBIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    group = tl.program_id(1).to(tl.int64)
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + cols, mask=cols < N, other=0.0).to(tl.float32) + offset
    dweight = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    dbias = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    # The rows that the statistics read last come first: they may still be in the L2 cache.
    tiles = tl.cdiv(M, BLOCK_M)
    for tile in tl.range(group, tiles, tl.num_programs(1), num_stages=STAGES):
        rows = ((tiles - 1 - tile) * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
        mask = (rows < M) & (cols < N)
        rstd = tl.load(rstd_ptr + rows, mask=rows < M, other=0.0)
        x = tl.load(x_ptr + rows * stride_x + cols, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + rows * stride_dy + cols, mask=mask, other=0.0).to(tl.float32)
        if HAS_MEAN:
            x -= tl.load(mean_ptr + rows, mask=rows < M, other=0.0)
        xhat = x * rstd
        if NEEDS_DWEIGHT:
            dweight += dy * xhat
        if NEEDS_DBIAS:
            dbias += dy
        if NEEDS_DX:
            g = dy
            if HAS_WEIGHT:
                g = dy * weight
            if HAS_MEAN:
                g -= tl.load(mean_g_ptr + rows, mask=rows < M, other=0.0)
            dx = rstd * (g - xhat * tl.load(projection_ptr + rows, mask=rows < M, other=0.0))
            if HAS_DS:
                dx += tl.load(ds_ptr + rows * stride_ds + cols, mask=mask, other=0.0).to(tl.float32)
            tl.store(dx_ptr + rows * N + cols, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    if NEEDS_DWEIGHT:
        sums = tl.sum(dweight, 0)[None, :]
        tl.store(dweight_ptr + group * N + cols, sums, mask=cols < N)
    if NEEDS_DBIAS:
        sums = tl.sum(dbias, 0)[None, :]
        tl.store(dbias_ptr + group * N + cols, sums, mask=cols < N)


# The tile of `_wide_backward_kernel`: columns a program owns, and rows it takes at a time. A 4096 x
# 32768 backward of rms_norm takes 0.325 ms with these, 0.330 ms without prefetch and with twice the
# programs.
OWNED_COLUMNS = 1024
OWNED_ROWS = 4


def plan(x: Tensor) -> Plan:
    """programs is the number of row groups: two programs a processor in all."""
    M, N = x.shape
    groups = max(1, 2 * processors(x) // cdiv(N, OWNED_COLUMNS))
    stages = pipeline_stages(x, 3 * OWNED_ROWS * OWNED_COLUMNS * x.element_size())
    return Plan(OWNED_ROWS, 2048, 256, min(cdiv(M, OWNED_ROWS), groups), stages)


def run(
    dy: Tensor,
    ds: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    dx: Tensor | None,
    dweight: Tensor | None,
    dbias: Tensor | None,
    offset: float,
    statistics: Statistics,
    plan: Plan,
) -> None:
    M, N = x.shape
    columns = min(OWNED_COLUMNS, plan.BLOCK_N)
    dweights = partial_sums(dweight, plan.programs)
    dbiases = partial_sums(dbias, plan.programs)
    launch(
        _wide_backward_kernel,
        (cdiv(N, columns), plan.programs),
        x,
        dy,
        ds,
        x,
        weight,
        statistics.mean,
        statistics.rstd,
        statistics.mean_g,
        statistics.projection,
        dx,
        dweights,
        dbiases,
        M,
        N,
        dy.stride(0),
        0 if ds is None else ds.stride(0),
        x.stride(0),
        offset,
        HAS_DS=ds is not None,
        HAS_MEAN=statistics.mean is not None,
        HAS_WEIGHT=weight is not None,
        NEEDS_DX=dx is not None,
        NEEDS_DWEIGHT=dweight is not None,
        NEEDS_DBIAS=dbias is not None,
        BLOCK_M=plan.BLOCK_M,
        BLOCK_N=columns,
        STAGES=plan.stages,
        num_warps=4,
    )
    summed((dweights, dweight), (dbiases, dbias))
