"""rms_norm, with and without a residual added first."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ... import library, meta
from ..triton_math import rms_rstd, rms_scaled, rms_square, rounded
from . import wide_backward
from .launch import Plan, cdiv, launch, next_power_of_2, processors, rows
from .partial_sums import partial_sums, summed


@triton.jit
def _load(
    x_ptr,
    residual_ptr,
    rows,
    cols,
    mask,
    stride_x,
    stride_residual,
    dtype: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    x = tl.load(x_ptr + rows * stride_x + cols, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + rows * stride_residual + cols, mask=mask, other=0.0)
        x = rounded(x + residual.to(tl.float32), dtype)
    return x


@triton.jit(do_not_specialize=["M"])
def _rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    y_ptr,
    s_ptr,
    M,
    N,
    stride_x,
    stride_residual,
    eps,
    offset,
    CASTING_MODE: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    rows = (tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
    cols = tl.arange(0, BLOCK_N)[None, :]
    mask = (rows < M) & (cols < N)
    x = _load(x_ptr, residual_ptr, rows, cols, mask, stride_x, stride_residual, dtype, HAS_RESIDUAL)
    if HAS_RESIDUAL:
        tl.store(s_ptr + rows * N + cols, x.to(dtype), mask=mask)
    weight = None
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
    sum_of_squares = tl.sum(rms_square(x, dtype, CASTING_MODE), 1)[:, None]
    rstd = rms_rstd(sum_of_squares, N, eps, dtype, CASTING_MODE)
    y = rms_scaled(x, rstd, weight, offset, dtype, CASTING_MODE, HAS_WEIGHT)
    tl.store(y_ptr + rows * N + cols, y.to(dtype), mask=mask)


@triton.jit(do_not_specialize=["M"])
def _rms_norm_wide_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    y_ptr,
    s_ptr,
    M,
    N,
    stride_x,
    stride_residual,
    eps,
    offset,
    CASTING_MODE: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    # A row a program, in tiles. The second walk finds the row in the L2 cache.
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    sums = tl.zeros((BLOCK_N,), tl.float32)
    for start in range(0, N, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        mask = cols < N
        x = _load(
            x_ptr, residual_ptr, row, cols, mask, stride_x, stride_residual, dtype, HAS_RESIDUAL
        )
        sums += rms_square(x, dtype, CASTING_MODE)
    rstd = rms_rstd(tl.sum(sums, 0), N, eps, dtype, CASTING_MODE)
    for start in range(0, N, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        mask = cols < N
        x = _load(
            x_ptr, residual_ptr, row, cols, mask, stride_x, stride_residual, dtype, HAS_RESIDUAL
        )
        if HAS_RESIDUAL:
            tl.store(s_ptr + row * N + cols, x.to(dtype), mask=mask)
        weight = None
        if HAS_WEIGHT:
            weight = tl.load(weight_ptr + cols, mask=mask, other=0.0).to(tl.float32)
        y = rms_scaled(x, rstd, weight, offset, dtype, CASTING_MODE, HAS_WEIGHT)
        tl.store(y_ptr + row * N + cols, y.to(dtype), mask=mask)


@triton.jit(do_not_specialize=["M"])
def _rms_norm_backward_kernel(
    dy_ptr,
    ds_ptr,
    x_ptr,
    weight_ptr,
    dx_ptr,
    dweight_ptr,
    M,
    N,
    stride_dy,
    stride_ds,
    stride_x,
    eps,
    offset,
    HAS_DS: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    NEEDS_DX: tl.constexpr,
    NEEDS_DWEIGHT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK_N)[None, :]
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + cols, mask=cols < N, other=0.0).to(tl.float32) + offset
    dweight = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in tl.range(program * BLOCK_M, M, tl.num_programs(0) * BLOCK_M, num_stages=STAGES):
        rows = (start + tl.arange(0, BLOCK_M))[:, None]
        mask = (rows < M) & (cols < N)
        x = tl.load(x_ptr + rows * stride_x + cols, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + rows * stride_dy + cols, mask=mask, other=0.0).to(tl.float32)
        mean_square = tl.sum(x * x, 1)[:, None] / N
        if BLOCK_M > 1:
            # Rows past M are zeros, of which eps = 0 would make 0 * inf in dweight.
            mean_square = tl.where(rows < M, mean_square, 1.0)
        rstd = tl.rsqrt(mean_square + eps)
        xhat = x * rstd
        if NEEDS_DWEIGHT:
            dweight += dy * xhat
        if NEEDS_DX:
            g = dy
            if HAS_WEIGHT:
                g = dy * weight
            dx = rstd * (g - xhat * (tl.sum(g * xhat, 1)[:, None] / N))
            if HAS_DS:
                dx += tl.load(ds_ptr + rows * stride_ds + cols, mask=mask, other=0.0).to(tl.float32)
            tl.store(dx_ptr + rows * N + cols, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    if NEEDS_DWEIGHT:
        sums = tl.sum(dweight, 0)[None, :]
        tl.store(dweight_ptr + program * N + cols, sums, mask=cols < N)


@triton.jit(do_not_specialize=["M"])
def _rms_norm_statistics_kernel(
    dy_ptr,
    x_ptr,
    weight_ptr,
    rstd_ptr,
    projection_ptr,
    M,
    N,
    stride_dy,
    stride_x,
    eps,
    offset,
    HAS_WEIGHT: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    # For each wide row: rstd, and mean(g * xhat), the projection of g on xhat.
    row = tl.program_id(0).to(tl.int64)
    squares = tl.zeros((BLOCK_N,), tl.float32)
    products = tl.zeros((BLOCK_N,), tl.float32)
    for start in range(0, N, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        mask = cols < N
        x = tl.load(x_ptr + row * stride_x + cols, mask=mask, other=0.0).to(tl.float32)
        g = tl.load(dy_ptr + row * stride_dy + cols, mask=mask, other=0.0).to(tl.float32)
        if HAS_WEIGHT:
            g *= tl.load(weight_ptr + cols, mask=mask, other=0.0).to(tl.float32) + offset
        squares += x * x
        products += g * x
    rstd = tl.rsqrt(tl.sum(squares, 0) / N + eps)
    tl.store(rstd_ptr + row, rstd)
    tl.store(projection_ptr + row, tl.sum(products, 0) * rstd / N)


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
    if x.numel() == 0:
        return
    x = rows(x)
    residual = None if residual is None else rows(residual)
    weight = None if weight is None else weight.contiguous()
    M, N = x.shape
    plan = plan or plan_forward(N)
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
        launch(_rms_norm_kernel, grid, x, *arguments, BLOCK_M=plan.BLOCK_M, **options)
    else:
        launch(_rms_norm_wide_kernel, (M,), x, *arguments, **options)


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
    if x.numel() == 0 or (dx is None and dweight is None):
        if dweight is not None:
            dweight.zero_()
        return
    x, dy = rows(x), rows(dy)
    ds = None if ds is None else rows(ds)
    weight = None if weight is None else weight.contiguous()
    M, N = x.shape
    plan = plan or plan_backward(M, N, processors(x))
    if plan.BLOCK_N < N:
        rstd, projection = x.new_empty((2, M), dtype=torch.float32)
        launch(
            _rms_norm_statistics_kernel,
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
        _rms_norm_backward_kernel,
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
        BLOCK_M=plan.BLOCK_M,
        BLOCK_N=plan.BLOCK_N,
        STAGES=plan.stages,
        num_warps=plan.num_warps,
    )
    summed(partial, dweight)


@library.kernel("rms_norm", "cuda")
def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    casting_mode: str = "llama",
    *,
    plan: Plan | None = None,
) -> Tensor:
    y = meta.rms_norm.rms_norm(x, weight, eps, offset, casting_mode)
    forward(x, None, weight, y, None, eps, offset, casting_mode, plan)
    return y


@library.kernel("rms_norm_backward", "cuda")
def rms_norm_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    offset: float,
    output_mask: list[bool],
    *,
    plan: Plan | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    dx, dweight = meta.rms_norm.rms_norm_backward(dy, x, weight, eps, offset, output_mask)
    backward(dy, None, x, weight, dx, dweight, eps, offset, plan)
    return dx, dweight
