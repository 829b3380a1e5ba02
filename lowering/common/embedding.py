"""Host code of embedding, for both devices. The gather is PyTorch's.

The backward sorts the indices (words): the positions of a word's rows of dy are then adjacent, a
*run*. A program sums a chunk of positions, and stores the runs that lie in the chunk as rows of
dweight. A chunk has at most two other runs: one that began before it, and one that goes on after
it. Their sums are partial, one row of float32 each, and a second kernel adds up those of each run.
The order of all sums is fixed: no atomics.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...ops.embedding import row_of
from .sizes import cdiv

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
