"""embedding: PyTorch's gather; lowering/common/embedding.py describes the backward. N columns."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ... import library
from ..common.embedding import chunk_length, gather, runs_of, sum_chunk, sum_parts
from ..common.tensors import cdiv
from . import tiling
from .tiling import COSTS, Cost, Plan, launch

# (1, 4096): 58.3%. A tile of (1, 8192) would overflow.
COSTS["embedding_backward"] = Cost({}, {2: 28.0, 4: 28.0})


@triton.jit(do_not_specialize=["n", "N", "chunks"])
def _embedding_chunks_kernel(
    words_ptr, order_ptr, dy_ptr, dweight_ptr, partial_ptr, n, N, V, padding, chunks,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # BLOCK_M is the number of rows in a chunk. A work item is a chunk and a block of columns.
    across = tl.cdiv(N, BLOCK_N)
    for item in tl.range(tl.program_id(0).to(tl.int64), chunks * across, tl.num_programs(0)):
        sum_chunk(
            words_ptr, order_ptr, dy_ptr, dweight_ptr, partial_ptr,
            n, N, V, padding, item // across, item % across * BLOCK_N, BLOCK_M, BLOCK_N,
        )  # fmt: skip


@triton.jit(do_not_specialize=["N", "chunks"])
def _embedding_parts_kernel(
    words_ptr, ends_ptr, dweight_ptr, partial_ptr, N, V, padding, chunks,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(N, BLOCK_N)
    for item in tl.range(tl.program_id(0).to(tl.int64), chunks * across, tl.num_programs(0)):
        sum_parts(
            words_ptr, ends_ptr, dweight_ptr, partial_ptr,
            N, V, padding, item // across, item % across * BLOCK_N, BLOCK_M, 1, BLOCK_N,
        )  # fmt: skip


@library.kernel("embedding", "npu")
def embedding(call: Any, y: Tensor, plan: Plan | None) -> None:
    gather(call, y)


@library.kernel("embedding_backward", "npu")
def embedding_backward(call: Any, dweight: Tensor, plan: Plan | None) -> None:
    # The kernels write the rows of the words that occur.
    dweight.zero_()
    if call.dy.numel() == 0:
        return
    N = call.dy.shape[-1]
    if plan is None:
        plan = tiling.plan("embedding_backward", N, call.dy)
        plan = replace(plan, BLOCK_M=chunk_length(call.indices.numel()))
    runs = runs_of(call, plan.BLOCK_M)
    V, n, across = dweight.shape[0], len(runs.dy), cdiv(N, plan.BLOCK_N)
    launch(
        _embedding_chunks_kernel, plan, runs.chunks * across,
        runs.words, runs.order, runs.dy, dweight, runs.partial,
        n, N, V, runs.padding, runs.chunks,
    )  # fmt: skip
    if len(runs.ends) > 0:
        launch(
            _embedding_parts_kernel, plan, len(runs.ends) * across,
            runs.words, runs.ends, dweight, runs.partial,
            N, V, runs.padding, len(runs.ends),
        )  # fmt: skip
