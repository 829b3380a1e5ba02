"""rms_norm for NPUs. M rows, N columns; a tile is (BLOCK_M, BLOCK_N).

A row that fits a tile is read once; a longer one is walked in chunks of BLOCK_N columns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ... import library, meta
from ..triton_math import rms_rstd, rms_square, rounded
from . import tiling
from .tiling import Plan


@triton.jit
def rms_weight(weight, offset, dtype: tl.constexpr, CASTING_MODE: tl.constexpr):
    """What xhat is multiplied by, float32."""
    scale = weight.to(tl.float32) + offset
    if CASTING_MODE == "none":
        scale = rounded(rounded(scale, weight.dtype), dtype)
    return scale


@triton.jit
def rms_normalised(x, rstd, dtype: tl.constexpr, CASTING_MODE: tl.constexpr):
    """xhat, rounded where the casting mode rounds it ahead of the product with the weight."""
    xhat = x * rstd
    if CASTING_MODE != "gemma":
        xhat = rounded(xhat, dtype)
    return xhat


@triton.jit
def _rms_norm_kernel(
    y_ptr,
    x_ptr,
    weight_ptr,
    M,
    N,
    eps,
    offset,
    CASTING_MODE: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    rows = tl.arange(0, BLOCK_M)[:, None]
    cols = tl.arange(0, BLOCK_N)[None, :]
    offsets = rows * N + cols
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + cols, mask=cols < N, other=0.0)
        scale = rms_weight(weight, offset, dtype, CASTING_MODE)
    for tile in tl.range(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.num_programs(0)):
        first = tile * BLOCK_M
        start = first.to(tl.int64) * N
        mask = (rows < M - first) & (cols < N)
        x = tl.load(x_ptr + start + offsets, mask=mask, other=0.0).to(tl.float32)
        total = tl.sum(rms_square(x, dtype, CASTING_MODE), axis=1)[:, None]
        y = rms_normalised(x, rms_rstd(total, N, eps, dtype, CASTING_MODE), dtype, CASTING_MODE)
        if HAS_WEIGHT:
            y = y * scale
        tl.store(y_ptr + start + offsets, y.to(dtype), mask=mask)


@triton.jit
def _rms_norm_chunked_kernel(
    y_ptr,
    x_ptr,
    weight_ptr,
    M,
    N,
    eps,
    offset,
    CASTING_MODE: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    rows = tl.arange(0, BLOCK_M)[:, None]
    cols = tl.arange(0, BLOCK_N)[None, :]
    offsets = rows * N + cols
    for tile in tl.range(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.num_programs(0)):
        first = tile * BLOCK_M
        start = first.to(tl.int64) * N
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for col in tl.range(0, N, BLOCK_N):
            mask = (rows < M - first) & (cols < N - col)
            x = tl.load(x_ptr + start + col + offsets, mask=mask, other=0.0).to(tl.float32)
            total += rms_square(x, dtype, CASTING_MODE)
        rstd = rms_rstd(tl.sum(total, axis=1)[:, None], N, eps, dtype, CASTING_MODE)
        for col in tl.range(0, N, BLOCK_N):
            mask = (rows < M - first) & (cols < N - col)
            x = tl.load(x_ptr + start + col + offsets, mask=mask, other=0.0).to(tl.float32)
            y = rms_normalised(x, rstd, dtype, CASTING_MODE)
            if HAS_WEIGHT:
                weight = tl.load(weight_ptr + col + cols, mask=cols < N - col, other=0.0)
                y = y * rms_weight(weight, offset, dtype, CASTING_MODE)
            tl.store(y_ptr + start + col + offsets, y.to(dtype), mask=mask)


@triton.jit
def _rms_norm_backward_kernel(
    dx_ptr,
    partial_ptr,
    dy_ptr,
    ds_ptr,
    x_ptr,
    weight_ptr,
    M,
    N,
    eps,
    offset,
    HAS_DX: tl.constexpr,
    HAS_DWEIGHT: tl.constexpr,
    HAS_DS: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    rows = tl.arange(0, BLOCK_M)[:, None]
    cols = tl.arange(0, BLOCK_N)[None, :]
    offsets = rows * N + cols
    if HAS_WEIGHT:
        scale = tl.load(weight_ptr + cols, mask=cols < N, other=0.0).to(tl.float32) + offset
    if HAS_DWEIGHT:
        dweight = tl.zeros((BLOCK_N,), tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.num_programs(0)):
        first = tile * BLOCK_M
        start = first.to(tl.int64) * N
        mask = (rows < M - first) & (cols < N)
        x = tl.load(x_ptr + start + offsets, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + start + offsets, mask=mask, other=0.0).to(tl.float32)
        mean_square = tl.sum(x * x, axis=1)[:, None] / N
        if BLOCK_M > 1:
            # Rows past M are zeros: at eps = 0 they would add 0 * inf to dweight.
            mean_square += tl.minimum(tl.maximum(rows + 1 - (M - first), 0), 1).to(tl.float32)
        rstd = tl.rsqrt(mean_square + eps)
        xhat = x * rstd
        product = dy * xhat
        if HAS_DWEIGHT:
            dweight += tl.sum(product, axis=0)
        if HAS_DX:
            g = dy
            if HAS_WEIGHT:
                g = dy * scale
            # The same sum twice: at (1, 4096), bf16 and fp32, the first takes 83% and 79% of the buffer
            # with ds (the second 83% and 92%), the second 88% and 75% without (the first 96% and 83%).
            if HAS_DS:
                dot = tl.sum(g * xhat, axis=1)[:, None] / N
            else:
                if HAS_WEIGHT:
                    product = product * scale
                dot = tl.sum(product, axis=1)[:, None] / N
            dx = g * rstd - xhat * (dot * rstd)
            if HAS_DS:
                dx += tl.load(ds_ptr + start + offsets, mask=mask, other=0.0).to(tl.float32)
            tl.store(dx_ptr + start + offsets, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    if HAS_DWEIGHT:
        col = tl.arange(0, BLOCK_N)
        tl.store(partial_ptr + tl.program_id(0) * N + col, dweight, mask=col < N)


@triton.jit
def _rms_norm_statistics_kernel(
    rstd_ptr,
    dot_ptr,
    dy_ptr,
    x_ptr,
    weight_ptr,
    M,
    N,
    eps,
    offset,
    HAS_DX: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Of each row: rstd, and what xhat is multiplied by in dx, rstd * mean(g * xhat)."""
    rows = tl.arange(0, BLOCK_M)[:, None]
    cols = tl.arange(0, BLOCK_N)[None, :]
    offsets = rows * N + cols
    for tile in tl.range(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.num_programs(0)):
        first = tile * BLOCK_M
        start = first.to(tl.int64) * N
        squares = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        products = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for col in tl.range(0, N, BLOCK_N):
            mask = (rows < M - first) & (cols < N - col)
            x = tl.load(x_ptr + start + col + offsets, mask=mask, other=0.0).to(tl.float32)
            squares += x * x
            if HAS_DX:
                g = tl.load(dy_ptr + start + col + offsets, mask=mask, other=0.0).to(tl.float32)
                if HAS_WEIGHT:
                    weight = tl.load(weight_ptr + col + cols, mask=cols < N - col, other=0.0)
                    g = g * (weight.to(tl.float32) + offset)
                products += g * x
        rstd = tl.rsqrt(tl.sum(squares, axis=1)[:, None] / N + eps)
        tl.store(rstd_ptr + first + rows, rstd, mask=rows < M - first)
        if HAS_DX:
            dot = tl.sum(products, axis=1)[:, None] / N * rstd * rstd
            tl.store(dot_ptr + first + rows, dot, mask=rows < M - first)


@triton.jit
def _rms_norm_backward_chunked_kernel(
    dx_ptr,
    partial_ptr,
    rstd_ptr,
    dot_ptr,
    dy_ptr,
    ds_ptr,
    x_ptr,
    weight_ptr,
    M,
    N,
    offset,
    slabs,
    HAS_DX: tl.constexpr,
    HAS_DWEIGHT: tl.constexpr,
    HAS_DS: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Each item is one chunk of columns and every slabs-th tile of rows: dweight sums over its loop."""
    rows = tl.arange(0, BLOCK_M)[:, None]
    cols = tl.arange(0, BLOCK_N)[None, :]
    offsets = rows * N + cols
    for item in tl.range(tl.program_id(0), tl.cdiv(N, BLOCK_N) * slabs, tl.num_programs(0)):
        slab = item % slabs
        col = (item // slabs).to(tl.int64) * BLOCK_N
        left = tl.minimum(N - col, BLOCK_N).to(tl.int32)
        if HAS_WEIGHT:
            weight = tl.load(weight_ptr + col + cols, mask=cols < left, other=0.0)
            scale = weight.to(tl.float32) + offset
        if HAS_DWEIGHT:
            dweight = tl.zeros((BLOCK_N,), tl.float32)
        for tile in tl.range(slab, tl.cdiv(M, BLOCK_M), slabs):
            first = tile * BLOCK_M
            start = first.to(tl.int64) * N + col
            mask = (rows < M - first) & (cols < left)
            rstd = tl.load(rstd_ptr + first + rows, mask=rows < M - first, other=0.0)
            x = tl.load(x_ptr + start + offsets, mask=mask, other=0.0).to(tl.float32)
            dy = tl.load(dy_ptr + start + offsets, mask=mask, other=0.0).to(tl.float32)
            xhat = x * rstd
            if HAS_DWEIGHT:
                dweight += tl.sum(dy * xhat, axis=0)
            if HAS_DX:
                dot = tl.load(dot_ptr + first + rows, mask=rows < M - first, other=0.0)
                g = dy
                if HAS_WEIGHT:
                    g = dy * scale
                dx = g * rstd - xhat * dot
                if HAS_DS:
                    dx += tl.load(ds_ptr + start + offsets, mask=mask, other=0.0).to(tl.float32)
                tl.store(dx_ptr + start + offsets, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        if HAS_DWEIGHT:
            c = tl.arange(0, BLOCK_N)
            tl.store(partial_ptr + slab.to(tl.int64) * N + col + c, dweight, mask=c < left)
