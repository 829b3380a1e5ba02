"""embedding: PyTorch's gather, and kernels for the backward, which lowering/common/embedding.py
describes. N columns."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ... import library
from ..common.embedding import chunk_length, gather, runs_of, sum_chunk, sum_parts
from ..common.tensors import cdiv, next_power_of_2
from .launch import Plan, Tile, launch

# Chunks whose partial sums a program loads at once.
PARTS = 16


# 8192 rows of a weight of 32768 x 4096 take 0.228 ms on an H200, and 32768 of 128256 x 4096 0.586.
# Other tiles were not timed.
def plan_backward(rows: int, N: int) -> Tile:
    """Plan chunks of BLOCK_M rows, in which a thread has up to 8 columns."""
    return Tile(min(1024, max(64, next_power_of_2(N))), BLOCK_M=chunk_length(rows))


@triton.jit(do_not_specialize=["n"])
def _embedding_chunks_kernel(
    words_ptr, order_ptr, dy_ptr, dweight_ptr, partial_ptr, n, N, V, padding,
    CHUNK: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1).to(tl.int64) * BLOCK_N
    sum_chunk(
        words_ptr, order_ptr, dy_ptr, dweight_ptr, partial_ptr,
        n, N, V, padding, chunk, col, CHUNK, BLOCK_N,
    )  # fmt: skip


@triton.jit
def _embedding_parts_kernel(
    words_ptr, ends_ptr, dweight_ptr, partial_ptr, N, V, padding,
    CHUNK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1).to(tl.int64) * BLOCK_N
    sum_parts(
        words_ptr, ends_ptr, dweight_ptr, partial_ptr,
        N, V, padding, chunk, col, CHUNK, BLOCK_M, BLOCK_N,
    )  # fmt: skip


@library.kernel("embedding", "cuda")
def embedding(call: Any, y: Tensor, plan: Plan | None) -> None:
    gather(call, y)


@library.kernel("embedding_backward", "cuda")
def embedding_backward(call: Any, dweight: Tensor, plan: Tile | None) -> None:
    # A word without rows is never stored.
    dweight.zero_()
    if call.dy.numel() == 0:
        return
    N = call.dy.shape[-1]
    plan = plan or plan_backward(call.indices.numel(), N)
    runs = runs_of(call, plan.BLOCK_M)
    V, n = dweight.shape[0], len(runs.dy)
    launch(
        _embedding_chunks_kernel, (runs.chunks, cdiv(N, plan.BLOCK_N)), dweight,
        runs.words, runs.order, runs.dy, dweight, runs.partial, n, N, V, runs.padding,
        CHUNK=plan.BLOCK_M, BLOCK_N=plan.BLOCK_N, num_warps=plan.num_warps,
    )  # fmt: skip
    # Only a full chunk has rows after it, and with them a run that goes on.
    if len(runs.ends) > 0:
        # Narrow tiles: if one word has most rows, a single run is long, and only its columns are
        # left to fill the GPU.
        BLOCK_N = min(128, plan.BLOCK_N)
        launch(
            _embedding_parts_kernel, (len(runs.ends), cdiv(N, BLOCK_N)), dweight,
            runs.words, runs.ends, dweight, runs.partial, N, V, runs.padding,
            CHUNK=plan.BLOCK_M, BLOCK_M=PARTS, BLOCK_N=BLOCK_N, num_warps=4,
        )  # fmt: skip
