"""Helpers of the elementwise kernels: every program takes some of the tiles of an (M, N) tensor.

The offsets within a tile are int32, and the start of a tile is an int64 scalar.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ...common.sizes import cdiv
from .. import tiling
from ..tile import load as load_tile
from ..tile import remaining
from ..tiling import Plan, launch


@triton.jit
def tiles(M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the number of tiles."""
    return tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)


@triton.jit
def place(tile, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the first row and the first column of a tile."""
    across = tl.cdiv(N, BLOCK_N)
    return tile // across * BLOCK_M, tile % across * BLOCK_N


@triton.jit
def _offsets(row, col, M, N, stride, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the elements' offsets from the tile's start, and the mask of those within M and N."""
    rows = tl.arange(0, BLOCK_M)[:, None]
    cols = tl.arange(0, BLOCK_N)[None, :]
    mask = (rows < remaining(M, row, BLOCK_M)) & (cols < remaining(N, col, BLOCK_N))
    return rows * stride + cols, mask


@triton.jit
def load(ptr, row, col, M, N, stride, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Load a tile as float32, with 0 beyond M and N."""
    offsets, mask = _offsets(row, col, M, N, stride, BLOCK_M, BLOCK_N)
    return load_tile(ptr + row * stride + col, offsets, mask)


@triton.jit
def store(ptr, row, col, M, N, stride, value, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Store a tile in the dtype of the pointer, without the elements beyond M and N."""
    offsets, mask = _offsets(row, col, M, N, stride, BLOCK_M, BLOCK_N)
    start = ptr + row * stride + col
    tl.store(start + offsets, value.to(ptr.dtype.element_ty), mask=mask)


def launch_tiles(
    op: str, kernel: Any, plan: Plan | None,
    tensors: list[Tensor | None], *args: Any, **constants: Any,
) -> None:  # fmt: skip
    """Launch a kernel over the tiles of `tensors`; the first has the result's shape (M, N)."""
    M, N = tensors[0].shape
    plan = plan or tiling.elementwise_plan(op, M, N, *tensors)
    tiles = cdiv(M, plan.BLOCK_M) * cdiv(N, plan.BLOCK_N)
    launch(kernel, plan, tiles, *tensors, M, N, *args, **constants)
