"""Host code of embedding, for both devices. The gather is PyTorch's.

The backward sorts the indices: a word's rows of dy are then a run of the sorted positions. A
program sums a chunk of positions, and stores the runs that lie in the chunk as rows of dweight. A
chunk has at most two others: a run that began before it, and one that goes on after it. Their sums
are partial, one row of float32 each, and a second kernel adds up those of each run.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...ops.embedding import row_of
from .sizes import cdiv

# Rows of dy that a program sums one after the other: fewer if there are too few rows to fill a
# device with.
LONG_CHUNK, SHORT_CHUNK = 32, 8
MANY_ROWS = 4096


def chunk_length(rows: int) -> int:
    return LONG_CHUNK if rows >= MANY_ROWS else SHORT_CHUNK


def gather(call: Any, y: Tensor) -> None:
    """Fill y with the rows. torch.index_select raises or asserts if an index is out of range."""
    indices = call.indices.reshape(-1)
    torch.index_select(call.weight, 0, indices, out=y.view(len(indices), y.shape[-1]))


class Runs(NamedTuple):
    """The positions of the sorted indices: each has a word, and its row of dy is `order` there."""

    dy: Tensor
    words: Tensor
    order: Tensor
    # For each full chunk, the end of the run that the chunk's last position is in.
    ends: Tensor
    # A chunk's sums of the run that began before it, and of that which goes on after it.
    partial: Tensor
    # Not a word if there is none.
    padding: int

    @property
    def chunks(self) -> int:
        return self.partial.shape[0]


def runs_of(call: Any, length: int) -> Runs:
    """The runs of a backward's indices, in chunks of `length` positions."""
    dy = call.dy.reshape(-1, call.dy.shape[-1]).contiguous()
    words, order = torch.sort(call.indices.reshape(-1), stable=True)
    ends = torch.searchsorted(words, words[length - 1 :: length].contiguous(), right=True)
    partial = dy.new_empty((cdiv(len(dy), length), 2, dy.shape[1]), dtype=torch.float32)
    padding = -1 if call.padding_idx is None else row_of(call.padding_idx, call.num_embeddings)
    return Runs(dy, words, order, ends, partial, int(padding))
