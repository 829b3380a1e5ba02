"""Sort the ids of experts, stably and on the device, and divide the experts' rows into blocks.

A counting sort: ids are counted in chunks, the counts are summed over the chunks, and an id's place
follows from these sums. There are no atomics, and the host knows every size without waiting for the
device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...common.tensors import cdiv, next_power_of_2
from ..launch import launch

# Ids of a program; each is compared with all ids of the chunk, OTHERS at a time.
CHUNK, OTHERS = 256, 32
# Experts whose counts a program sums, and the chunks that it takes at a time.
BINS, CHUNKS = 16, 512
# Blocks of rows whose experts a program of _blocks_kernel computes.
BLOCKS = 64


class RowBlocks(NamedTuple):
    """The blocks of rows of one expert each.

    `table` is (2 * most + 1,): the expert of each block, then the first row of each, and last the
    number of blocks, which only the device knows. `most` is the most blocks that there can be.
    """

    table: Tensor
    most: int


@triton.jit
def _ids(ids_ptr, places, n, E):
    """Load the ids at these places: E for sentinels, and behind the last id."""
    ids = tl.load(ids_ptr + places, mask=places < n, other=-1)
    return tl.where((ids >= 0) & (ids < E), ids, E).to(tl.int32)


@triton.jit(do_not_specialize=["n"])
def _count_kernel(ids_ptr, counts_ptr, n, E, CHUNK: tl.constexpr, BINS: tl.constexpr):
    chunk = tl.program_id(0)
    ids = _ids(ids_ptr, chunk * CHUNK + tl.arange(0, CHUNK), n, E)
    tl.store(counts_ptr + chunk * BINS + tl.arange(0, BINS), tl.histogram(ids, BINS))


@triton.jit(do_not_specialize=["chunks"])
def _sum_kernel(
    counts_ptr, totals_ptr, chunks, ALL: tl.constexpr, CHUNKS: tl.constexpr, BINS: tl.constexpr
):
    """Replace each chunk's counts by the sums of the chunks before it."""
    bins = tl.program_id(0) * BINS + tl.arange(0, BINS)
    total = tl.zeros((BINS,), tl.int32)
    for first in range(0, chunks, CHUNKS):
        rows = first + tl.arange(0, CHUNKS)
        places = rows[:, None] * ALL + bins[None, :]
        counts = tl.load(counts_ptr + places, mask=(rows < chunks)[:, None], other=0)
        before = total[None, :] + tl.cumsum(counts, 0) - counts
        tl.store(counts_ptr + places, before, mask=(rows < chunks)[:, None])
        total += tl.sum(counts, 0)
    tl.store(totals_ptr + bins, total)


@triton.jit(do_not_specialize=["n"])
def _place_kernel(
    ids_ptr, counts_ptr, totals_ptr, order_ptr, offsets_ptr, n, E,
    CHUNK: tl.constexpr, OTHERS: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    # An id's place: the ids of smaller experts, those of its expert in earlier chunks, and those
    # before it in its own chunk.
    chunk = tl.program_id(0)
    bins = tl.arange(0, BINS)
    totals = tl.load(totals_ptr + bins)
    starts = tl.cumsum(totals, 0) - totals
    if chunk == 0:
        tl.store(offsets_ptr + bins, starts, mask=bins <= E)
    starts += tl.load(counts_ptr + chunk * BINS + bins)
    own = chunk * CHUNK + tl.arange(0, CHUNK)
    ids = _ids(ids_ptr, own, n, E)
    place = tl.gather(starts, ids, 0)
    for first in range(0, CHUNK, OTHERS):
        other = chunk * CHUNK + first + tl.arange(0, OTHERS)
        same = ids[:, None] == _ids(ids_ptr, other, n, E)[None, :]
        place += tl.sum((same & (other[None, :] < own[:, None])).to(tl.int32), 1)
    tl.store(order_ptr + place, own, mask=own < n)


@triton.jit(do_not_specialize=["most"])
def _blocks_kernel(
    offsets_ptr, table_ptr, most, E,
    BLOCK_M: tl.constexpr, BLOCKS: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    bins = tl.arange(0, BINS)
    first = tl.load(offsets_ptr + bins, mask=bins < E, other=0)
    counts = tl.load(offsets_ptr + bins + 1, mask=bins < E, other=0) - first
    blocks = tl.cdiv(counts, BLOCK_M)
    ends = tl.cumsum(blocks, 0)
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    # The expert of a block is the number of experts whose blocks all come before it.
    expert = tl.sum((ends[None, :] <= block[:, None]).to(tl.int32), 1)
    is_own = expert[:, None] == bins[None, :]
    row = tl.sum(tl.where(is_own, (first - (ends - blocks) * BLOCK_M)[None, :], 0), 1)
    tl.store(table_ptr + block, expert, mask=block < most)
    tl.store(table_ptr + most + block, row + block * BLOCK_M, mask=block < most)
    if tl.program_id(0) == 0:
        tl.store(table_ptr + 2 * most, tl.sum(blocks, 0))


def sort(top_k_index: Tensor, order: Tensor, offsets: Tensor) -> None:
    """Fill order with the places of the ids sorted by expert, those of sentinels last, and offsets
    with the start of each expert's ids, (E + 1,)."""
    ids, E = top_k_index.contiguous(), offsets.numel() - 1
    n, bins = ids.numel(), max(BINS, next_power_of_2(E + 1))
    chunks = cdiv(n, CHUNK)
    counts = ids.new_empty(chunks + 1, bins, dtype=torch.int32)
    totals = counts[-1]
    launch(_count_kernel, (chunks,), ids, ids, counts, n, E, CHUNK=CHUNK, BINS=bins, num_warps=4)
    launch(
        _sum_kernel, (bins // BINS,), ids, counts, totals, chunks,
        ALL=bins, CHUNKS=CHUNKS, BINS=BINS, num_warps=8,
    )  # fmt: skip
    launch(
        _place_kernel, (chunks,), ids, ids, counts, totals, order, offsets, n, E,
        CHUNK=CHUNK, OTHERS=OTHERS, BINS=bins, num_warps=4,
    )  # fmt: skip


def blocks_of(offsets: Tensor, rows: int, BLOCK_M: int) -> RowBlocks:
    """Divide each expert's rows into blocks of BLOCK_M."""
    E = offsets.numel() - 1
    # Each expert may have one block that is not full.
    most = cdiv(rows, BLOCK_M) + E
    table = offsets.new_empty(2 * most + 1)
    launch(
        _blocks_kernel, (cdiv(most, BLOCKS),), offsets, offsets, table, most, E,
        BLOCK_M=BLOCK_M, BLOCKS=BLOCKS, BINS=next_power_of_2(E), num_warps=4,
    )  # fmt: skip
    return RowBlocks(table, most)
