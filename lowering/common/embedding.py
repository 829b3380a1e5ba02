"""embedding on a device. The gather is PyTorch's.

The backward sorts the indices (words): the positions of a word's rows of dy are then adjacent, a
*run*. A program sums a chunk of positions, and stores the runs that lie in the chunk as rows of
dweight. A chunk has at most two other runs: one that began before it, and one that goes on after
it. Their sums are partial, one row of float32 each, and a second kernel adds up those of each run.
The order of all sums is fixed: no atomics.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...ops.embedding import row_of
from .tensors import cdiv


@triton.jit
def counts(word, V, padding):
    """Return whether a word's row of dweight is summed."""
    return (word >= 0) & (word < V) & (word != padding)


@triton.jit
def _word_before(words_ptr, start):
    """Return the word at start - 1, or -1, which is no word that counts, if start is 0.

    The address is one of the tensor in any case: an NPU loads a single number whatever its mask.
    """
    word = tl.load(words_ptr + tl.maximum(start - 1, 0))
    return tl.where(start > 0, word, -1)


@triton.jit
def sum_chunk(
    words_ptr, order_ptr, dy_ptr, dweight_ptr, partial_ptr,
    n, N, V, padding, chunk, col,
    CHUNK: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Sum the runs of one chunk of the n positions, in BLOCK_N of N columns from `col` on."""
    # Offsets within a tile are int32; `chunk` and `col` are int64, and with them every start.
    cols = tl.arange(0, BLOCK_N)[None, :]
    mask = cols < tl.minimum(N - col, BLOCK_N).to(tl.int32)
    start = chunk * CHUNK
    stop = tl.minimum(start + CHUNK, n)
    before = _word_before(words_ptr, start)
    zeros = tl.zeros((1, BLOCK_N), tl.float32)
    total, last = zeros, before
    for i in tl.range(start, stop):
        word = tl.load(words_ptr + i)
        following = tl.where(i + 1 < n, tl.load(words_ptr + tl.minimum(i + 1, n - 1)), -1)
        counted = counts(word, V, padding)
        if counted:
            row = tl.load(order_ptr + i)
            values = tl.load(dy_ptr + row * N + col + cols, mask=mask, other=0.0).to(tl.float32)
            # A branch in which each side adds: the compiler of CANN 9.1.0 for the Ascend 950
            # crashes at a choice between two tiles by one condition.
            if (i == start) | (last != word):
                total = zeros + values
            else:
                total += values
        if counted & ((i + 1 == stop) | (following != word)):
            begun = before == word
            if begun | (following == word):
                # Row 0 of the chunk for a run that began before it, though it may go on too; row 1
                # for one that begins here.
                place = chunk * 2 + 1 - begun.to(tl.int64)
                tl.store(partial_ptr + place * N + col + cols, total, mask=mask)
            else:
                place = word.to(tl.int64) * N + col
                value = total.to(dweight_ptr.dtype.element_ty)
                tl.store(dweight_ptr + place + cols, value, mask=mask)
        last = word


@triton.jit
def sum_parts(
    words_ptr, ends_ptr, dweight_ptr, partial_ptr,
    N, V, padding, chunk, col,
    CHUNK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Add up the partial sums of the run that begins in a full chunk and goes on after it, if the
    chunk has one: BLOCK_M chunks at a time."""
    cols = tl.arange(0, BLOCK_N)[None, :]
    rows = tl.arange(0, BLOCK_M)[:, None]
    mask = cols < tl.minimum(N - col, BLOCK_N).to(tl.int32)
    start = chunk * CHUNK
    stop = start + CHUNK
    word = tl.load(words_ptr + stop - 1)
    before = _word_before(words_ptr, start)
    end = tl.load(ends_ptr + chunk)
    if (end > stop) & (before != word) & counts(word, V, padding):
        # Row 1 of the chunk in which the run begins, and row 0 of each later one.
        first = tl.load(partial_ptr + (chunk * 2 + 1) * N + col + cols, mask=mask, other=0.0)
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        last = (end + CHUNK - 1) // CHUNK
        for later in tl.range(chunk + 1, last, BLOCK_M):
            left = tl.minimum(last - later, BLOCK_M).to(tl.int32)
            start_of_rows = partial_ptr + later * 2 * N + col
            offsets = rows * (2 * N) + cols
            total += tl.load(start_of_rows + offsets, mask=mask & (rows < left), other=0.0)
        value = first + tl.sum(total, 0)[None, :]
        place = word.to(tl.int64) * N + col
        tl.store(dweight_ptr + place + cols, value.to(dweight_ptr.dtype.element_ty), mask=mask)


# Rows of dy that a program sums one after the other: the short chunk if there are fewer rows than
# MANY_ROWS, too few to fill a device with long ones.
LONG_CHUNK, SHORT_CHUNK = 32, 8
MANY_ROWS = 4096


def chunk_length(rows: int) -> int:
    return LONG_CHUNK if rows >= MANY_ROWS else SHORT_CHUNK


def gather(call: Any, y: Tensor) -> None:
    """Fill y with the rows of the weight.

    torch.index_select raises (CPU) or asserts on the device if an index is out of range.
    """
    indices = call.indices.reshape(-1)
    torch.index_select(call.weight, 0, indices, out=y.view(len(indices), y.shape[-1]))


class Runs(NamedTuple):
    """The sorted indices of a backward: position i has the word `words[i]` and the row `order[i]`
    of dy."""

    dy: Tensor
    words: Tensor
    order: Tensor
    # For each full chunk, the end of the run that contains the chunk's last position.
    ends: Tensor
    # (chunks, 2, N), float32: a chunk's sum of the run that began before it, and its sum of the run
    # that goes on after it.
    partial: Tensor
    # The word that has no gradient, or -1, which is no word.
    padding: int

    @property
    def chunks(self) -> int:
        return self.partial.shape[0]


def runs_of(call: Any, length: int) -> Runs:
    """Sort a backward's indices into runs, in chunks of `length` positions."""
    dy = call.dy.reshape(-1, call.dy.shape[-1]).contiguous()
    # Stable: the rows of a word are added in the order of the tokens.
    words, order = torch.sort(call.indices.reshape(-1), stable=True)
    ends = torch.searchsorted(words, words[length - 1 :: length].contiguous(), right=True)
    partial = dy.new_empty((cdiv(len(dy), length), 2, dy.shape[1]), dtype=torch.float32)
    padding = -1 if call.padding_idx is None else row_of(call.padding_idx, call.num_embeddings)
    return Runs(dy, words, order, ends, partial, int(padding))
