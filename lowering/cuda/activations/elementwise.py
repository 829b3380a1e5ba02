"""Elementwise kernels of (M, N) tensors, where a program has one tile."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ...common.sizes import cdiv, tile_width
from ..launch import Plan, Tile, launch


@triton.jit
def place(M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the rows of this program's tile, and its first column."""
    # int64 from the program on: a flat row may have more than 2**31 elements.
    program = tl.program_id(0)
    across = tl.cdiv(N, BLOCK_N)
    row = (program // across).to(tl.int64) * BLOCK_M
    rows = (row + tl.arange(0, BLOCK_M))[:, None]
    return rows, (program % across).to(tl.int64) * BLOCK_N


@triton.jit
def columns(col, rows, M, N, BLOCK_N: tl.constexpr):
    """Return BLOCK_N columns from `col` on, and the mask of the elements that are inside
    (M, N)."""
    cols = col + tl.arange(0, BLOCK_N)[None, :]
    return cols, (rows < M) & (cols < N)


def plan_tiles(N: int) -> Tile:
    """Plan tiles of 1024 elements: 128 threads of 8 elements, which are 16 bytes in half
    precision."""
    BLOCK_N = tile_width(N, 1024)
    return Tile(BLOCK_N, BLOCK_M=1024 // BLOCK_N)


def launch_tiles(kernel: Any, plan: Plan | None, x: Tensor, *args: Any, **constants: Any) -> None:
    """Run kernel over the tiles of x, (M, N)."""
    M, N = x.shape
    plan = plan or plan_tiles(N)
    launch(
        kernel, (cdiv(M, plan.BLOCK_M) * cdiv(N, plan.BLOCK_N),), x,
        *args,
        **constants, BLOCK_M=plan.BLOCK_M, BLOCK_N=plan.BLOCK_N, num_warps=plan.num_warps,
    )  # fmt: skip
