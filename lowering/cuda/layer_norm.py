"""layer_norm."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ... import library
from ..sizes import cdiv, next_power_of_2
from ..tensors import contiguous
from ..triton_math import folded, widened_again
from . import walked_backward, wide_backward
from .launch import Plan, Tiles, launch, pipeline_stages, processors, rows
from .partial_sums import partial_sums, summed
from .row_sums import mean_and_rstd, two_row_sums


@triton.jit
def _affine(xhat, weight_ptr, bias_ptr, cols, N, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr):
    if HAS_WEIGHT:
        xhat *= tl.load(weight_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
    if HAS_BIAS:
        xhat += tl.load(bias_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
    return xhat


@triton.jit
def _first_mean(x_ptr, N, BLOCK_N: tl.constexpr):
    # The mean of the first of T tiles of a row: sums of squares about it lose at most a factor of T
    # in precision, whatever the row's own mean is.
    cols = tl.arange(0, BLOCK_N)
    x = tl.load(x_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
    return tl.sum(x, 0) / tl.minimum(N, BLOCK_N)


@triton.jit(do_not_specialize=["M"])
def _layer_norm_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    M,
    N,
    stride_x,
    eps,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    rows = (tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
    cols = tl.arange(0, BLOCK_N)[None, :]
    mask = cols < N
    if BLOCK_M > 1:
        mask &= rows < M
    x = tl.load(x_ptr + rows * stride_x + cols, mask=mask, other=0.0)
    if BLOCK_N > 8192:
        # One round of sums, about the mean of the row's first elements: 8192 x 16384 takes 0.136
        # ms, with two rounds 0.145.
        near = tl.arange(0, 32)[None, :]
        first = tl.load(x_ptr + rows * stride_x + near, mask=near < N, other=0.0)
        shift = tl.sum(first.to(tl.float32), 1)[:, None] / tl.minimum(N, 32)
        shifted = tl.where(mask, x.to(tl.float32) - shift, 0.0)
        sums, squares = two_row_sums(shifted, shifted * shifted)
        step = sums / N
        mean = shift + step
        variance = tl.maximum(squares / N - step * step, 0.0)
        centred = widened_again(x) - mean
    else:
        mean = tl.sum(x.to(tl.float32), 1)[:, None] / N
        centred = tl.where(mask, widened_again(x) - mean, 0.0)
        variance = tl.sum(centred * centred, 1)[:, None] / N
    rstd = tl.rsqrt(variance + eps)
    y = _affine(centred * rstd, weight_ptr, bias_ptr, cols, N, HAS_WEIGHT, HAS_BIAS)
    tl.store(y_ptr + rows * N + cols, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["M"])
def _layer_norm_wide_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    M,
    N,
    stride_x,
    eps,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    UNROLL: tl.constexpr,
    TRIPS: tl.constexpr,
    FOLD: tl.constexpr,
):
    # A row a program, in tiles. The second walk finds the row in the caches, the first asks them to
    # keep it.
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * stride_x
    shift = _first_mean(x_ptr, N, BLOCK_N)
    sums = tl.zeros((BLOCK_N // FOLD,), tl.float32)
    squares = tl.zeros((BLOCK_N // FOLD,), tl.float32)
    for trip in range(0, TRIPS):
        for i in tl.static_range(UNROLL):
            cols = (trip * UNROLL + i) * BLOCK_N + tl.arange(0, BLOCK_N)
            mask = cols < N
            x = tl.load(x_ptr + cols, mask=mask, other=0.0, eviction_policy="evict_last")
            x = tl.where(mask, x.to(tl.float32) - shift, 0.0)
            sums += folded(x, FOLD)
            squares += folded(x * x, FOLD)
    mean, rstd, _ = mean_and_rstd(tl.sum(sums, 0), tl.sum(squares, 0), shift, N, eps)
    for trip in range(0, TRIPS):
        for i in tl.static_range(UNROLL):
            cols = (trip * UNROLL + i) * BLOCK_N + tl.arange(0, BLOCK_N)
            mask = cols < N
            x = tl.load(x_ptr + cols, mask=mask, other=0.0, eviction_policy="evict_first")
            xhat = (x.to(tl.float32) - mean) * rstd
            y = _affine(xhat, weight_ptr, bias_ptr, cols, N, HAS_WEIGHT, HAS_BIAS)
            tl.store(y_ptr + row * N + cols, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["M"])
def _layer_norm_backward_kernel(
    dy_ptr,
    x_ptr,
    weight_ptr,
    dx_ptr,
    dweight_ptr,
    dbias_ptr,
    M,
    N,
    stride_dy,
    stride_x,
    eps,
    HAS_WEIGHT: tl.constexpr,
    NEEDS_DX: tl.constexpr,
    NEEDS_DWEIGHT: tl.constexpr,
    NEEDS_DBIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK_N)[None, :]
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
    dweight = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    dbias = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in tl.range(program * BLOCK_M, M, tl.num_programs(0) * BLOCK_M, num_stages=STAGES):
        rows = (start + tl.arange(0, BLOCK_M))[:, None]
        mask = (rows < M) & (cols < N)
        dy = tl.load(dy_ptr + rows * stride_dy + cols, mask=mask, other=0.0).to(tl.float32)
        if NEEDS_DBIAS:
            dbias += dy
        if NEEDS_DX or NEEDS_DWEIGHT:
            x = tl.load(x_ptr + rows * stride_x + cols, mask=mask, other=0.0).to(tl.float32)
            g = dy
            if HAS_WEIGHT:
                g = dy * weight
            mean = tl.sum(x, 1)[:, None] / N
            mean_g = tl.sum(g, 1)[:, None] / N
            centred = tl.where(mask, x - mean, 0.0)
            variance = tl.sum(centred * centred, 1)[:, None] / N
            if BLOCK_M > 1:
                # Rows past M are zeros, of which eps = 0 would make 0 * inf in dweight.
                variance = tl.where(rows < M, variance, 1.0)
            rstd = tl.rsqrt(variance + eps)
            projection = tl.sum(g * centred, 1)[:, None] / N * rstd
            xhat = centred * rstd
            if NEEDS_DWEIGHT:
                dweight += dy * xhat
            if NEEDS_DX:
                dx = rstd * (g - mean_g - xhat * projection)
                tl.store(dx_ptr + rows * N + cols, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    if NEEDS_DWEIGHT:
        sums = tl.sum(dweight, 0)[None, :]
        tl.store(dweight_ptr + program * N + cols, sums, mask=cols < N)
    if NEEDS_DBIAS:
        sums = tl.sum(dbias, 0)[None, :]
        tl.store(dbias_ptr + program * N + cols, sums, mask=cols < N)


@triton.jit(do_not_specialize=["M"])
def _layer_norm_statistics_kernel(
    dy_ptr,
    x_ptr,
    weight_ptr,
    statistics_ptr,
    M,
    N,
    stride_dy,
    stride_x,
    eps,
    HAS_WEIGHT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FOLD: tl.constexpr,
):
    # Each wide row's mean, rstd, mean(g) and mean(g * xhat), in one walk.
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * stride_x
    dy_ptr += row * stride_dy
    shift = _first_mean(x_ptr, N, BLOCK_N)
    sums = tl.zeros((BLOCK_N // FOLD,), tl.float32)
    squares = tl.zeros((BLOCK_N // FOLD,), tl.float32)
    sums_g = tl.zeros((BLOCK_N // FOLD,), tl.float32)
    products = tl.zeros((BLOCK_N // FOLD,), tl.float32)
    for start in range(0, N, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        mask = cols < N
        x = tl.load(x_ptr + cols, mask=mask, other=0.0).to(tl.float32)
        g = tl.load(dy_ptr + cols, mask=mask, other=0.0).to(tl.float32)
        if HAS_WEIGHT:
            g *= tl.load(weight_ptr + cols, mask=mask, other=0.0).to(tl.float32)
        x = tl.where(mask, x - shift, 0.0)
        sums += folded(x, FOLD)
        squares += folded(x * x, FOLD)
        sums_g += folded(g, FOLD)
        products += folded(g * x, FOLD)
    mean, rstd, step = mean_and_rstd(tl.sum(sums, 0), tl.sum(squares, 0), shift, N, eps)
    mean_g = tl.sum(sums_g, 0) / N
    tl.store(statistics_ptr + row, mean)
    tl.store(statistics_ptr + M.to(tl.int64) + row, rstd)
    tl.store(statistics_ptr + 2 * M.to(tl.int64) + row, mean_g)
    projection = (tl.sum(products, 0) / N - step * mean_g) * rstd
    tl.store(statistics_ptr + 3 * M.to(tl.int64) + row, projection)


# Rows wider than one program holds are walked twice, UNROLL tiles at a time. A thread sums FOLD
# neighbours into one accumulator.
UNROLL = 4
FOLD = 8

# A backward's rows walked twice: for 8192 on an H200, in ms, and by the two kernels of wider rows.
BACKWARD_TILES: Tiles = {
    # 10240 wide 0.174 and 0.211, 12288 0.185 and 0.248, 16384 0.234 and 0.326.
    2: ((16384, Plan(1, 4096, 512, stages=2)),),
    # 10240 wide 0.254 and 0.399, 12288 0.314 and 0.476, 16384 0.499 and 0.634.
    4: ((12288, Plan(1, 2048, 256, stages=2)), (16384, Plan(1, 2048, 256))),
}


def plan_forward(x: Tensor) -> Plan:
    """4096 wide takes 93% of the H200's copy rate in bfloat16; 16384 wide 92%, in tiles 88%.

    32768 wide takes 0.148 ms a 4096 rows with these tiles, 0.183 with tiles of 8192; 65536 prefers
    those. A thread has 64 bytes: in float32, 8192 x 6144 takes 0.102 ms so, with 128 bytes 0.104.
    """
    N = x.shape[1]
    BLOCK_N = next_power_of_2(N)
    if BLOCK_N > 16384:
        tile = min(8192, BLOCK_N // 8)
        return Plan(1, tile, threads=tile // 8)
    BLOCK_M = max(1, 2048 // BLOCK_N)
    threads = BLOCK_M * BLOCK_N * x.element_size() // 64
    return Plan(BLOCK_M, BLOCK_N, threads=min(512, max(128, threads)))


def plan_backward(x: Tensor) -> Plan:
    """32768 x 4096 takes 0.207 ms with 32 elements a thread and prefetch, 0.216 ms with 16.

    A row of 16384 with both sums does not fit in registers: 8192 of them take 0.31 ms at the least
    in one piece, 0.23 walked. Rows of 128 take 79% of the H200's copy rate with 8 elements a
    thread, 35% with 32.
    """
    M, N = x.shape
    BLOCK_N = next_power_of_2(N)
    if BLOCK_N > 8192:
        return walked_backward.plan(x, BACKWARD_TILES) or wide_backward.plan(x)
    tile = max(BLOCK_N, 2048 if BLOCK_N <= 1024 else 4096)
    BLOCK_M = tile // BLOCK_N
    programs = processors(x) * max(1, 8192 // tile)
    stages = pipeline_stages(x, 2 * tile * x.element_size())
    threads = tile // (8 if BLOCK_N <= 128 else 32)
    return Plan(BLOCK_M, BLOCK_N, threads, min(cdiv(M, BLOCK_M), programs), stages)


@library.kernel("layer_norm", "cuda")
def layer_norm(call, y, plan):
    x, weight, bias = rows(call.x), contiguous(call.weight), contiguous(call.bias)
    M, N = x.shape
    plan = plan or plan_forward(x)
    arguments = (x, weight, bias, y, M, N, x.stride(0), call.eps)
    options = {
        "HAS_WEIGHT": weight is not None,
        "HAS_BIAS": bias is not None,
        "BLOCK_N": plan.BLOCK_N,
        "num_warps": plan.num_warps,
    }
    if plan.BLOCK_N >= N:
        grid = (cdiv(M, plan.BLOCK_M),)
        launch(_layer_norm_kernel, grid, x, *arguments, BLOCK_M=plan.BLOCK_M, **options)
    else:
        launch(
            _layer_norm_wide_kernel,
            (M,),
            x,
            *arguments,
            UNROLL=UNROLL,
            TRIPS=cdiv(N, UNROLL * plan.BLOCK_N),
            FOLD=min(FOLD, plan.BLOCK_N),
            **options,
        )


@library.kernel("layer_norm_backward", "cuda")
def layer_norm_backward(call, dx, dweight, dbias, plan):
    x, dy, weight = rows(call.x), rows(call.dy), contiguous(call.weight)
    M, N = x.shape
    plan = plan or plan_backward(x)
    if walked_backward.walks(plan, N):
        gradients = (dx, dweight, dbias)
        walked_backward.run(dy, None, x, weight, *gradients, call.eps, 0.0, plan, has_mean=True)
        return
    if plan.BLOCK_N < N:
        statistics = x.new_empty((4, M), dtype=torch.float32)
        launch(
            _layer_norm_statistics_kernel,
            (M,),
            x,
            dy,
            x,
            weight,
            statistics,
            M,
            N,
            dy.stride(0),
            x.stride(0),
            call.eps,
            HAS_WEIGHT=weight is not None,
            BLOCK_N=plan.BLOCK_N,
            FOLD=min(FOLD, plan.BLOCK_N),
            num_warps=plan.num_warps,
        )
        mean, rstd, mean_g, projection = statistics
        wide_backward.run(
            dy,
            None,
            x,
            weight,
            dx,
            dweight,
            dbias,
            0.0,
            wide_backward.Statistics(rstd, projection, mean, mean_g),
            plan,
        )
        return
    dweights = partial_sums(dweight, plan.programs)
    dbiases = partial_sums(dbias, plan.programs)
    launch(
        _layer_norm_backward_kernel,
        (plan.programs,),
        x,
        dy,
        x,
        weight,
        dx,
        dweights,
        dbiases,
        M,
        N,
        dy.stride(0),
        x.stride(0),
        call.eps,
        HAS_WEIGHT=weight is not None,
        NEEDS_DX=dx is not None,
        NEEDS_DWEIGHT=dweight is not None,
        NEEDS_DBIAS=dbias is not None,
        BLOCK_M=plan.BLOCK_M,
        BLOCK_N=plan.BLOCK_N,
        STAGES=plan.stages,
        num_warps=plan.num_warps,
    )
    summed((dweights, dweight), (dbiases, dbias))
