"""rms_norm, with and without a residual added first."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..rms_norm import register
from ..sizes import cdiv, next_power_of_2
from . import walked_backward, wide_backward
from .launch import Plan, Tiles, launch, pipeline_stages, processors, rows, walk_plan
from .partial_sums import partial_sums, summed
from .rms_norm_kernels import (
    rms_norm_backward_kernel,
    rms_norm_kernel,
    rms_norm_statistics_kernel,
    rms_norm_wide_kernel,
)

# Shares of the H200's copy rate.
TILES: Tiles = {
    # 8192 wide 96%, 12288 95%, 16384 96%, 24576 93%, 32768 95%, 65536 90%.
    2: (
        (8192, Plan(1, 2048, 256)),
        (16384, Plan(1, 4096, 512)),
        (24576, Plan(1, 4096, 1024)),
        (32768, Plan(1, 8192, 1024)),
        (math.inf, Plan(1, 16384, 1024)),
    ),
    # 8192 wide 97%, 16384 98%, 24576 96%, 32768 93%, 65536 80%.
    4: (
        (24576, Plan(1, 4096, 1024)),
        (32768, Plan(1, 8192, 1024)),
        (math.inf, Plan(1, 16384, 1024)),
    ),
}
# With a residual: 8192 x 32768 takes 98%, in float32 97%, there 82% in tiles of 8192.
RESIDUAL_TILES: Tiles = {
    2: ((32768, Plan(1, 8192, 1024)), (math.inf, Plan(1, 16384, 1024))),
    4: ((math.inf, Plan(1, 16384, 1024)),),
}
# Of rows walked twice: for an H200, in ms, and by the two kernels of wider rows.
BACKWARD_TILES: Tiles = {
    # 4096 rows of 20480 0.150 and 0.209, of 24576 0.191 and 0.248, of 32768 0.242 and 0.326.
    2: ((20480, Plan(1, 4096, 512, stages=2)), (32768, Plan(1, 8192, 512))),
    # 8192 rows of 12288 0.312 and 0.476, of 16384 0.391 and 0.631, 4096 of 24576 0.356 and 0.479,
    # of 28672 0.486 and 0.561, but of 32768 0.903 and 0.712.
    4: (
        (12288, Plan(1, 4096, 256, stages=2)),
        (24576, Plan(1, 8192, 256)),
        (28672, Plan(1, 4096, 256)),
    ),
}
RESIDUAL_BACKWARD_TILES: Tiles = {
    # 4096 rows of 20480 0.209 and 0.249, of 28672 0.325 and 0.343, but of 32768 0.538 and 0.388.
    2: (
        (20480, Plan(1, 4096, 512)),
        (24576, Plan(1, 8192, 512)),
        (28672, Plan(1, 4096, 512)),
    ),
    # 8192 rows of 16384 0.522 and 0.752, 4096 of 20480 0.385 and 0.481, of 24576 0.480 and 0.569.
    4: (
        (16384, Plan(1, 8192, 256)),
        (20480, Plan(1, 4096, 256)),
        (24576, Plan(1, 8192, 256)),
    ),
}


def plan_forward(x: Tensor, residual: Tensor | None) -> Plan:
    """Shares of the H200's copy rate in bfloat16, whole rows: 1024 wide 86%, 4096 97%, 5120 81%,
    7168 90%; 8192 92%, and more in tiles. With a residual 16384 wide take 95% in one piece.
    """
    N = x.shape[1]
    BLOCK_N = next_power_of_2(N)
    if N < 8192 or (residual is not None and BLOCK_N <= 16384):
        BLOCK_M = max(1, 2048 // BLOCK_N)
        threads = 512 if BLOCK_N == 16384 else min(256, max(128, BLOCK_M * BLOCK_N // 16))
        return Plan(BLOCK_M, BLOCK_N, threads)
    return walk_plan(x, TILES if residual is None else RESIDUAL_TILES)


def plan_backward(x: Tensor, loads: int) -> Plan:
    """loads is how many tensors of x's shape the kernel reads.

    With prefetch and 32 elements a thread, 32768 x 4096 takes 0.203 ms and 16384 x 8192 0.201 ms;
    without prefetch 0.265 ms. A row of 16384 leaves no registers for it: 0.210 ms. In float32 it
    does not fit: 0.490 ms, and 0.391 walked. Rows of 128 take 85% of the H200's copy rate with 8
    elements a thread, 71% with 32.
    """
    M, N = x.shape
    BLOCK_N = next_power_of_2(N)
    if BLOCK_N * x.element_size() > 32768:
        tiles = BACKWARD_TILES if loads == 2 else RESIDUAL_BACKWARD_TILES
        return walked_backward.plan(x, tiles) or wide_backward.plan(x)
    tile = max(BLOCK_N, 2048 if BLOCK_N <= 1024 else 4096)
    BLOCK_M = tile // BLOCK_N
    programs = min(cdiv(M, BLOCK_M), processors(x) * max(1, 8192 // tile))
    stages = 1
    if BLOCK_N < 16384:
        stages = pipeline_stages(x, loads * tile * x.element_size())
    return Plan(BLOCK_M, BLOCK_N, tile // (8 if BLOCK_N <= 128 else 32), programs, stages)


def forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    y: Tensor,
    s: Tensor | None,
    eps: float,
    offset: float,
    casting_mode: str,
    plan: Plan | None,
) -> None:
    """Launch the forward of rms_norm, and of fused_add_rms_norm where there is a residual."""
    x = rows(x)
    residual = None if residual is None else rows(residual)
    weight = None if weight is None else weight.contiguous()
    M, N = x.shape
    plan = plan or plan_forward(x, residual)
    arguments = (
        x,
        residual,
        weight,
        y,
        s,
        M,
        N,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        eps,
        offset,
    )
    options = {
        "CASTING_MODE": casting_mode,
        "HAS_RESIDUAL": residual is not None,
        "HAS_WEIGHT": weight is not None,
        "BLOCK_N": plan.BLOCK_N,
        "num_warps": plan.num_warps,
    }
    if plan.BLOCK_N >= N:
        grid = (cdiv(M, plan.BLOCK_M),)
        launch(rms_norm_kernel, grid, x, *arguments, BLOCK_M=plan.BLOCK_M, **options)
    else:
        # What a thread writes at once, the same with and without a residual.
        fold = min(plan.BLOCK_N, 16 // y.element_size())
        tiles = cdiv(N, plan.BLOCK_N)
        launch(rms_norm_wide_kernel, (M,), x, *arguments, TILES=tiles, FOLD=fold, **options)


def backward(
    dy: Tensor,
    ds: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    dx: Tensor | None,
    dweight: Tensor | None,
    eps: float,
    offset: float,
    plan: Plan | None,
) -> None:
    """Launch the backward of rms_norm, and of fused_add_rms_norm where there is a ds."""
    x, dy = rows(x), rows(dy)
    ds = None if ds is None else rows(ds)
    weight = None if weight is None else weight.contiguous()
    M, N = x.shape
    plan = plan or plan_backward(x, 2 if ds is None else 3)
    if walked_backward.walks(plan, N):
        walked_backward.run(dy, ds, x, weight, dx, dweight, None, eps, offset, plan, has_mean=False)
        return
    if plan.BLOCK_N < N:
        rstd, projection = x.new_empty((2, M), dtype=torch.float32)
        launch(
            rms_norm_statistics_kernel,
            (M,),
            x,
            dy,
            x,
            weight,
            rstd,
            projection,
            M,
            N,
            dy.stride(0),
            x.stride(0),
            eps,
            offset,
            HAS_WEIGHT=weight is not None,
            BLOCK_N=plan.BLOCK_N,
            num_warps=plan.num_warps,
        )
        statistics = wide_backward.Statistics(rstd=rstd, projection=projection)
        wide_backward.run(dy, ds, x, weight, dx, dweight, None, offset, statistics, plan)
        return
    partial = partial_sums(dweight, plan.programs)
    launch(
        rms_norm_backward_kernel,
        (plan.programs,),
        x,
        dy,
        ds,
        x,
        weight,
        dx,
        partial,
        M,
        N,
        dy.stride(0),
        0 if ds is None else ds.stride(0),
        x.stride(0),
        eps,
        offset,
        HAS_DS=ds is not None,
        HAS_WEIGHT=weight is not None,
        NEEDS_DX=dx is not None,
        NEEDS_DWEIGHT=dweight is not None,
        KEEPS_WEIGHT=plan.BLOCK_N <= 8192,
        BLOCK_M=plan.BLOCK_M,
        BLOCK_N=plan.BLOCK_N,
        STAGES=plan.stages,
        num_warps=plan.num_warps,
    )
    summed((partial, dweight))


register("cuda", forward, backward)
