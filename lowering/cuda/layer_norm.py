"""layer_norm."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ... import library, meta
from ..triton_math import lane_counts, lanes_updated
from . import wide_backward
from .launch import Plan, cdiv, launch, next_power_of_2, processors, rows
from .partial_sums import partial_sums, summed


@triton.jit
def _affine(xhat, weight_ptr, bias_ptr, cols, N, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr):
    if HAS_WEIGHT:
        xhat *= tl.load(weight_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
    if HAS_BIAS:
        xhat += tl.load(bias_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
    return xhat


@triton.jit
def _standardised(x, mask, N, eps):
    centred = tl.where(mask, x - tl.sum(x, 1)[:, None] / N, 0.0)
    rstd = tl.rsqrt(tl.sum(centred * centred, 1)[:, None] / N + eps)
    return centred * rstd, rstd


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
    mask = (rows < M) & (cols < N)
    x = tl.load(x_ptr + rows * stride_x + cols, mask=mask, other=0.0).to(tl.float32)
    xhat, _ = _standardised(x, mask, N, eps)
    y = _affine(xhat, weight_ptr, bias_ptr, cols, N, HAS_WEIGHT, HAS_BIAS)
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
):
    # A row a program, in tiles. The second walk finds the row in the L2 cache.
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK_N)
    mean = tl.zeros((BLOCK_N,), tl.float32)
    m2 = tl.zeros((BLOCK_N,), tl.float32)
    for tile in range(0, tl.cdiv(N, BLOCK_N)):
        cols = tile * BLOCK_N + lanes
        x = tl.load(x_ptr + row * stride_x + cols, mask=cols < N, other=0.0).to(tl.float32)
        mean, m2 = lanes_updated(x, cols < N, tile, mean, m2)
    counts = lane_counts(lanes, N, BLOCK_N)
    row_mean = tl.sum(mean * counts, 0) / N
    deviation = mean - row_mean
    rstd = tl.rsqrt(tl.sum(m2 + counts * deviation * deviation, 0) / N + eps)
    for tile in range(0, tl.cdiv(N, BLOCK_N)):
        cols = tile * BLOCK_N + lanes
        x = tl.load(x_ptr + row * stride_x + cols, mask=cols < N, other=0.0).to(tl.float32)
        y = _affine((x - row_mean) * rstd, weight_ptr, bias_ptr, cols, N, HAS_WEIGHT, HAS_BIAS)
        tl.store(y_ptr + row * N + cols, y.to(y_ptr.dtype.element_ty), mask=cols < N)


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
            xhat, rstd = _standardised(x, mask, N, eps)
            if NEEDS_DWEIGHT:
                dweight += dy * xhat
            if NEEDS_DX:
                g = dy
                if HAS_WEIGHT:
                    g = dy * weight
                mean_g = tl.sum(g, 1)[:, None] / N
                projection = tl.sum(g * xhat, 1)[:, None] / N
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
):
    # Each wide row's mean, rstd, mean(g) and mean(g * xhat), in one walk: every lane keeps the sum
    # of g * (x - its mean so far), and corrects it whenever that mean moves.
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK_N)
    mean = tl.zeros((BLOCK_N,), tl.float32)
    m2 = tl.zeros((BLOCK_N,), tl.float32)
    sum_g = tl.zeros((BLOCK_N,), tl.float32)
    product = tl.zeros((BLOCK_N,), tl.float32)
    for tile in range(0, tl.cdiv(N, BLOCK_N)):
        cols = tile * BLOCK_N + lanes
        mask = cols < N
        x = tl.load(x_ptr + row * stride_x + cols, mask=mask, other=0.0).to(tl.float32)
        g = tl.load(dy_ptr + row * stride_dy + cols, mask=mask, other=0.0).to(tl.float32)
        if HAS_WEIGHT:
            g *= tl.load(weight_ptr + cols, mask=mask, other=0.0).to(tl.float32)
        before = mean
        mean, m2 = lanes_updated(x, mask, tile, mean, m2)
        product += g * (x - mean) - sum_g * (mean - before)
        sum_g += g
    counts = lane_counts(lanes, N, BLOCK_N)
    row_mean = tl.sum(mean * counts, 0) / N
    deviation = mean - row_mean
    rstd = tl.rsqrt(tl.sum(m2 + counts * deviation * deviation, 0) / N + eps)
    tl.store(statistics_ptr + row, row_mean)
    tl.store(statistics_ptr + M.to(tl.int64) + row, rstd)
    tl.store(statistics_ptr + 2 * M.to(tl.int64) + row, tl.sum(sum_g, 0) / N)
    projection = tl.sum(product + sum_g * deviation, 0) * rstd / N
    tl.store(statistics_ptr + 3 * M.to(tl.int64) + row, projection)


def plan_forward(N: int) -> Plan:
    BLOCK_N = next_power_of_2(N)
    if BLOCK_N > 65536:
        return Plan(BLOCK_M=1, BLOCK_N=8192, threads=1024)
    BLOCK_M = max(1, 2048 // BLOCK_N)
    return Plan(BLOCK_M, BLOCK_N, threads=min(1024, max(128, BLOCK_M * BLOCK_N // 16)))


def plan_backward(M: int, N: int, processors: int) -> Plan:
    BLOCK_N = next_power_of_2(N)
    if BLOCK_N > 16384:
        return wide_backward.plan(M, N, processors)
    BLOCK_M = max(1, 2048 // BLOCK_N)
    threads = min(1024, max(128, BLOCK_M * BLOCK_N // 16))
    programs = min(cdiv(M, BLOCK_M), processors * max(1, 1024 // threads))
    return Plan(BLOCK_M, BLOCK_N, threads, programs)


@library.kernel("layer_norm", "cuda")
def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    plan: Plan | None = None,
) -> Tensor:
    y = meta.layer_norm.layer_norm(x, weight, bias, eps)
    if x.numel() == 0:
        return y
    x = rows(x)
    weight = None if weight is None else weight.contiguous()
    bias = None if bias is None else bias.contiguous()
    M, N = x.shape
    plan = plan or plan_forward(N)
    arguments = (x, weight, bias, y, M, N, x.stride(0), eps)
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
        launch(_layer_norm_wide_kernel, (M,), x, *arguments, **options)
    return y


@library.kernel("layer_norm_backward", "cuda")
def layer_norm_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    output_mask: list[bool],
    *,
    plan: Plan | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    dx, dweight, dbias = gradients = meta.layer_norm.layer_norm_backward(
        dy, x, weight, bias, eps, output_mask
    )
    if x.numel() == 0 or gradients == (None, None, None):
        for sums in (dweight, dbias):
            if sums is not None:
                sums.zero_()
        return gradients
    x, dy = rows(x), rows(dy)
    weight = None if weight is None else weight.contiguous()
    M, N = x.shape
    plan = plan or plan_backward(M, N, processors(x))
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
            eps,
            HAS_WEIGHT=weight is not None,
            BLOCK_N=plan.BLOCK_N,
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
        return gradients
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
        eps,
        HAS_WEIGHT=weight is not None,
        NEEDS_DX=dx is not None,
        NEEDS_DWEIGHT=dweight is not None,
        NEEDS_DBIAS=dbias is not None,
        BLOCK_M=plan.BLOCK_M,
        BLOCK_N=plan.BLOCK_N,
        STAGES=plan.stages,
        num_warps=plan.num_warps,
    )
    summed(dweights, dweight)
    summed(dbiases, dbias)
    return gradients
