"""softmax and log_softmax."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ... import library, meta
from ..sizes import cdiv, next_power_of_2
from ..triton_math import LOWEST
from .launch import Plan, launch, rows


@triton.jit(do_not_specialize=["M"])
def _softmax_kernel(
    x_ptr,
    y_ptr,
    M,
    N,
    stride_x,
    LOG: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    rows = (tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
    cols = tl.arange(0, BLOCK_N)[None, :]
    mask = (rows < M) & (cols < N)
    x = tl.load(x_ptr + rows * stride_x + cols, mask=mask, other=-float("inf")).to(tl.float32)
    x -= tl.maximum(tl.max(x, 1), LOWEST)[:, None]
    exp = tl.exp(x)
    sum = tl.sum(exp, 1)[:, None]
    y = x - tl.log(sum) if LOG else exp / sum
    tl.store(y_ptr + rows * N + cols, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["M"])
def _softmax_wide_kernel(
    x_ptr,
    y_ptr,
    M,
    N,
    stride_x,
    LOG: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    # A row a program, in tiles. The first walk keeps the maximum so far, and every lane's sum of
    # exponentials relative to it. The second finds the row in the L2 cache.
    row = tl.program_id(0).to(tl.int64)
    maximum = LOWEST
    sums = tl.zeros((BLOCK_N,), tl.float32)
    for start in range(0, N, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        x = tl.load(x_ptr + row * stride_x + cols, mask=cols < N, other=-float("inf"))
        x = x.to(tl.float32)
        higher = tl.maximum(maximum, tl.max(x, 0))
        sums = sums * tl.exp(maximum - higher) + tl.exp(x - higher)
        maximum = higher
    sum = tl.sum(sums, 0)
    for start in range(0, N, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        x = tl.load(x_ptr + row * stride_x + cols, mask=cols < N, other=0.0).to(tl.float32)
        x -= maximum
        y = x - tl.log(sum) if LOG else tl.exp(x) / sum
        tl.store(y_ptr + row * N + cols, y.to(y_ptr.dtype.element_ty), mask=cols < N)


@triton.jit(do_not_specialize=["M"])
def _softmax_backward_kernel(
    dy_ptr,
    y_ptr,
    dx_ptr,
    M,
    N,
    stride_dy,
    stride_y,
    LOG: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    rows = (tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
    cols = tl.arange(0, BLOCK_N)[None, :]
    mask = (rows < M) & (cols < N)
    dy = tl.load(dy_ptr + rows * stride_dy + cols, mask=mask, other=0.0).to(tl.float32)
    y = tl.load(y_ptr + rows * stride_y + cols, mask=mask, other=0.0).to(tl.float32)
    sum = tl.sum(dy if LOG else dy * y, 1)[:, None]
    dx = dy - tl.exp(y) * sum if LOG else y * (dy - sum)
    tl.store(dx_ptr + rows * N + cols, dx.to(dx_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["M"])
def _softmax_wide_backward_kernel(
    dy_ptr,
    y_ptr,
    dx_ptr,
    M,
    N,
    stride_dy,
    stride_y,
    LOG: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    sums = tl.zeros((BLOCK_N,), tl.float32)
    for start in range(0, N, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        mask = cols < N
        term = tl.load(dy_ptr + row * stride_dy + cols, mask=mask, other=0.0).to(tl.float32)
        if not LOG:
            term *= tl.load(y_ptr + row * stride_y + cols, mask=mask, other=0.0).to(tl.float32)
        sums += term
    sum = tl.sum(sums, 0)
    for start in range(0, N, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        mask = cols < N
        dy = tl.load(dy_ptr + row * stride_dy + cols, mask=mask, other=0.0).to(tl.float32)
        y = tl.load(y_ptr + row * stride_y + cols, mask=mask, other=0.0).to(tl.float32)
        dx = dy - tl.exp(y) * sum if LOG else y * (dy - sum)
        tl.store(dx_ptr + row * N + cols, dx.to(dx_ptr.dtype.element_ty), mask=mask)


def plan_rows(N: int) -> Plan:
    # Of 65536 columns a thread of sm_90 spills up to 216 bytes, forward, of 32768 none, and
    # backward 48.
    BLOCK_N = next_power_of_2(N)
    if BLOCK_N > 32768:
        return Plan(BLOCK_M=1, BLOCK_N=8192, threads=1024)
    BLOCK_M = max(1, 2048 // BLOCK_N)
    return Plan(BLOCK_M, BLOCK_N, threads=min(1024, max(128, BLOCK_M * BLOCK_N // 16)))


def forward(x: Tensor, y: Tensor, log: bool, plan: Plan | None) -> None:
    """Launch the forward of softmax, or of log_softmax."""
    if x.numel() == 0:
        return
    x = rows(x)
    M, N = x.shape
    plan = plan or plan_rows(N)
    arguments = (x, y, M, N, x.stride(0))
    options = {"LOG": log, "BLOCK_N": plan.BLOCK_N, "num_warps": plan.num_warps}
    if plan.BLOCK_N >= N:
        grid = (cdiv(M, plan.BLOCK_M),)
        launch(_softmax_kernel, grid, x, *arguments, BLOCK_M=plan.BLOCK_M, **options)
    else:
        launch(_softmax_wide_kernel, (M,), x, *arguments, **options)


def backward(dy: Tensor, y: Tensor, dx: Tensor, log: bool, plan: Plan | None) -> None:
    """Launch the backward of softmax, or of log_softmax."""
    if y.numel() == 0:
        return
    dy, y = rows(dy), rows(y)
    M, N = y.shape
    plan = plan or plan_rows(N)
    arguments = (dy, y, dx, M, N, dy.stride(0), y.stride(0))
    options = {"LOG": log, "BLOCK_N": plan.BLOCK_N, "num_warps": plan.num_warps}
    if plan.BLOCK_N >= N:
        grid = (cdiv(M, plan.BLOCK_M),)
        launch(_softmax_backward_kernel, grid, y, *arguments, BLOCK_M=plan.BLOCK_M, **options)
    else:
        launch(_softmax_wide_backward_kernel, (M,), y, *arguments, **options)


@library.kernel("softmax", "cuda")
def softmax(x: Tensor, *, plan: Plan | None = None) -> Tensor:
    y = meta.softmax.softmax(x)
    forward(x, y, False, plan)
    return y


@library.kernel("softmax_backward", "cuda")
def softmax_backward(dy: Tensor, y: Tensor, *, plan: Plan | None = None) -> Tensor:
    dx = meta.softmax.softmax_backward(dy, y)
    backward(dy, y, dx, False, plan)
    return dx
