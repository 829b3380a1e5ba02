"""attn_res on a device: host code, and the tiles of the kernels.

Tensors with one number for each token of each block are left to PyTorch: the softmax for rows that
are too wide for one pass, and the factors of the gradient.

In kernels x is (blocks, M, N), contiguous; w is (N,), float32. A tile is (BLOCK_M, BLOCK_N) of
tokens and columns; `row` is its first token, an int64. The start of a tile is an int64 scalar added
to the pointer; the offsets within it are int32.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..triton_math import LOWEST


@triton.jit
def _load(ptr, offsets, mask):
    return tl.load(ptr + offsets, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _left(size, first, BLOCK: tl.constexpr):
    """Count how many of BLOCK elements from `first` on are below `size`, as int32."""
    return tl.minimum(size - first, BLOCK).to(tl.int32)


@triton.jit
def mixed_rows(
    x_ptr, w_ptr, y_ptr, blocks, M, N, eps, row, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Compute the result of whole rows, with a running softmax over the blocks."""
    rows = tl.arange(0, BLOCK_M)[:, None]
    cols = tl.arange(0, BLOCK_N)[None, :]
    row_mask = rows < _left(M, row, BLOCK_M)
    mask = row_mask & (cols < N)
    w = _load(w_ptr, cols, cols < N)
    maximum = tl.full((BLOCK_M, 1), LOWEST, tl.float32)
    total = tl.zeros((BLOCK_M, 1), tl.float32)
    y = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for block in tl.range(0, blocks):
        x = _load(x_ptr + (block * M + row) * N, rows * N + cols, mask)
        rstd = tl.rsqrt(tl.sum(x * x, axis=1)[:, None] / N + eps)
        score = tl.sum(x * w, axis=1)[:, None] * rstd
        # Online softmax: the sums so far are scaled down to the new maximum.
        higher = tl.maximum(maximum, score)
        kept, share = tl.exp(maximum - higher), tl.exp(score - higher)
        total = total * kept + share
        y = y * kept + x * share
        maximum = higher
    y = y / total
    tl.store(y_ptr + row * N + rows * N + cols, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def scored_rows(
    x_ptr, w_ptr, dy_ptr, score_ptr, rstd_ptr, dalpha_ptr, M, N, eps, block, row,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute score and, with dy, rstd and dalpha of a block's rows."""
    rows = tl.arange(0, BLOCK_M)[:, None]
    cols = tl.arange(0, BLOCK_N)[None, :]
    row_mask = rows < _left(M, row, BLOCK_M)
    squares = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    products = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if dy_ptr is not None:
        dots = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for col in tl.range(0, N, BLOCK_N):
        col_mask = cols < _left(N, col, BLOCK_N)
        mask = row_mask & col_mask
        x = _load(x_ptr + (block * M + row) * N + col, rows * N + cols, mask)
        squares += x * x
        products += x * _load(w_ptr + col, cols, col_mask)
        if dy_ptr is not None:
            dots += x * _load(dy_ptr + row * N + col, rows * N + cols, mask)
    rstd = tl.rsqrt(tl.sum(squares, axis=1)[:, None] / N + eps)
    place = block * M + row
    tl.store(score_ptr + place + rows, tl.sum(products, axis=1)[:, None] * rstd, mask=row_mask)
    if dy_ptr is not None:
        tl.store(rstd_ptr + place + rows, rstd, mask=row_mask)
        tl.store(dalpha_ptr + place + rows, tl.sum(dots, axis=1)[:, None], mask=row_mask)


@triton.jit
def mixed_columns(
    x_ptr, alpha_ptr, y_ptr, blocks, M, N, row, col,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_N columns of the result, from alpha (blocks, M)."""
    rows = tl.arange(0, BLOCK_M)[:, None]
    cols = tl.arange(0, BLOCK_N)[None, :]
    row_mask = rows < _left(M, row, BLOCK_M)
    mask = row_mask & (cols < _left(N, col, BLOCK_N))
    y = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for block in tl.range(0, blocks):
        alpha = _load(alpha_ptr + block * M + row, rows, row_mask)
        y += alpha * _load(x_ptr + (block * M + row) * N + col, rows * N + cols, mask)
    start = y_ptr + row * N + col
    tl.store(start + rows * N + cols, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def column_gradients(
    dy_ptr, x_ptr, w_ptr, of_dy_ptr, of_w_ptr, of_x_ptr, dx_ptr, dw_ptr,
    blocks, M, N, split, splits, col,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_N columns of dx in every splits-th tile of rows, and the split's part of dw:

    dx = of_dy * dy + of_w * w + of_x * x and dw = sum of of_w * x, with factors (blocks, M).
    """
    rows = tl.arange(0, BLOCK_M)[:, None]
    cols = tl.arange(0, BLOCK_N)[None, :]
    col_mask = cols < _left(N, col, BLOCK_N)
    w = _load(w_ptr + col, cols, col_mask)
    if dw_ptr is not None:
        dw = tl.zeros((1, BLOCK_N), tl.float32)
    for tile in tl.range(split, tl.cdiv(M, BLOCK_M), splits):
        row = tile * BLOCK_M
        row_mask = rows < _left(M, row, BLOCK_M)
        mask = row_mask & col_mask
        offsets = rows * N + cols
        if dx_ptr is not None:
            dy = _load(dy_ptr + row * N + col, offsets, mask)
        for block in tl.range(0, blocks):
            place = block * M + row
            x = _load(x_ptr + place * N + col, offsets, mask)
            of_w = _load(of_w_ptr + place, rows, row_mask)
            if dw_ptr is not None:
                dw += tl.sum(of_w * x, axis=0)[None, :]
            if dx_ptr is not None:
                of_dy = _load(of_dy_ptr + place, rows, row_mask)
                of_x = _load(of_x_ptr + place, rows, row_mask)
                dx = of_dy * dy + of_w * w + of_x * x
                start = dx_ptr + place * N + col
                tl.store(start + offsets, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    if dw_ptr is not None:
        tl.store(dw_ptr + split * N + col + cols, dw, mask=col_mask)


def blocks_of(x: Tensor) -> Tensor:
    """Return x as (blocks, M, N), contiguous."""
    return x.reshape(x.shape[0], -1, x.shape[-1]).contiguous()


def combined(call: Any) -> Tensor:
    """Compute query * weight, (N,), in float32."""
    query = call.query.float()
    return (query if call.weight is None else query * call.weight.float()).contiguous()


def per_row(x: Tensor, count: int) -> Tensor:
    """Allocate `count` float32 numbers for each row of each block: (count, blocks, M)."""
    return x.new_empty((count, *x.shape[:2]), dtype=torch.float32)


def factors(score: Tensor, rstd: Tensor, dalpha: Tensor, N: int) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the factors of dy, w and x in dx; each is (blocks, M)."""
    alpha = torch.softmax(score, 0)
    of_w = (dalpha - (alpha * dalpha).sum(0)).mul_(alpha).mul_(rstd)
    return alpha, of_w, (of_w * rstd).mul_(score).div_(-N)


def finish(call: Any, dw: Tensor | None, dquery: Tensor | None, dweight: Tensor | None) -> None:
    """Fill the gradients of query and weight from dw, the gradient of their product."""
    if dquery is not None and dw is not None:
        dquery.copy_(dw if call.weight is None else dw * call.weight)
    if dweight is not None and dw is not None:
        dweight.copy_(dw * call.query)
