"""A matrix product whose rows have the same bits in every batch: its tiles depend on the dtype
alone, and their sums run over K in order. B products of M x K and K x N."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common.tensors import cdiv
from .experts.products import _product
from .launch import input_precision, launch

GROUP = 8


@dataclass(frozen=True)
class ProductTiles:
    """The tiles of a product."""

    BLOCK_M: int
    BLOCK_N: int
    BLOCK_K: int
    num_warps: int
    num_stages: int


# 96 KiB of shared memory with 3 stages, of the 99 of sm_86 and sm_89.
HALF = ProductTiles(128, 128, 64, 8, 3)
SINGLE = ProductTiles(64, 64, 32, 4, 3)


def takes(a: Tensor) -> bool:
    """Return whether `product` is for the dtype and the device of a."""
    return a.is_cuda and a.dtype in (torch.float16, torch.bfloat16, torch.float32)


@triton.jit(do_not_specialize=["M"])
def _product_kernel(
    a_ptr, b_ptr, y_ptr, M, N, K, stride_ab, stride_am, stride_bb, stride_bk, stride_bn,
    EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, PRECISION: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    # The tiles of GROUP blocks of rows are neighbours, so that columns of b stay in the cache.
    down, across = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    group = tl.program_id(0) // (GROUP * across)
    size = min(down - group * GROUP, GROUP)
    within = tl.program_id(0) % (GROUP * across)
    rows = (group * GROUP + within % size) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = within // size * BLOCK_N + tl.arange(0, BLOCK_N)
    batch = tl.program_id(1).to(tl.int64)
    exists, inside = rows < M, cols < N
    # Rows behind the last stand for the first: no load needs a mask of rows.
    acc = _product(
        tl.zeros((BLOCK_M, BLOCK_N), tl.float32),
        a_ptr + batch * stride_ab + tl.where(exists, rows, 0).to(tl.int64) * stride_am,
        b_ptr + batch * stride_bb + cols.to(tl.int64) * stride_bn,
        inside, stride_bk, K, EVEN_N, EVEN_K, PRECISION, BLOCK_K,
    )  # fmt: skip
    at = (batch * M + rows.to(tl.int64))[:, None] * N + cols[None, :]
    tl.store(y_ptr + at, acc.to(y_ptr.dtype.element_ty), mask=exists[:, None] & inside[None, :])


def product(a: Tensor, b: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return a @ b, (B, M, N), of `dtype` or of a's.

    Sums are in float32; float32 is multiplied as PyTorch multiplies it.

    Args:
        a: (B, M, K), rows of unit stride.
        b: (B, K, N), of a's dtype.
    """
    B, M, K = a.shape
    N = b.shape[2]
    y = a.new_empty((B, M, N), dtype=dtype or a.dtype)
    if y.numel() == 0:
        return y
    tiles = SINGLE if a.dtype is torch.float32 else HALF
    launch(
        _product_kernel, (cdiv(M, tiles.BLOCK_M) * cdiv(N, tiles.BLOCK_N), B), a,
        a, b, y, M, N, K, *a.stride()[:2], *b.stride(),
        EVEN_N=N % tiles.BLOCK_N == 0, EVEN_K=K % tiles.BLOCK_K == 0,
        PRECISION=input_precision(a), GROUP=GROUP,
        BLOCK_M=tiles.BLOCK_M, BLOCK_N=tiles.BLOCK_N, BLOCK_K=tiles.BLOCK_K,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    return y
