"""The number of tokens of a chunk of a head over a sharded vocabulary.

It is a number while the number of all tokens is a symbol: a graph depends on the number of chunks
alone. It is the same on all ranks, which have as many chunks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...ops.heads.chunks import BACKWARD_BYTES, TILE, set_bytes
from ...ops.heads.gradients import accumulation_dtype, rounds_once
from .products import Head
from .words import Words


def chunk_size(row_bytes: int, chunk_bytes: int | None) -> int:
    """The tokens of a chunk of at most chunk_bytes, or one."""
    most = set_bytes(chunk_bytes) or BACKWARD_BYTES
    fitting = max(1, most // max(1, row_bytes))
    return fitting if fitting < TILE else fitting // TILE * TILE


def loss_chunk_size(
    head: Head, words: Words, wanted: Sequence[bool], chunk_bytes: int | None,
    accum_dtype: torch.dtype | None,
) -> int:  # fmt: skip
    """The tokens of a chunk of a loss: all of them, if nobody set a size and a single chunk takes
    no more memory than several.

    A single chunk takes its logits and their gradient, and then the gradient of weight in the
    place of the logits. Several take three chunks, the gradient of weight in a wider dtype, and
    that of x.
    """
    rows, weight = head.rows, head.weight
    item_bytes = rows.element_size()
    row_bytes = words.most * item_bytes
    size = chunk_size(row_bytes, chunk_bytes)
    if set_bytes(chunk_bytes):
        return size
    sum_bytes = dx_bytes = 0
    if wanted[1] and rounds_once(weight, accum_dtype):
        sum_bytes = words.most * rows.shape[1] * accumulation_dtype(weight, accum_dtype).itemsize
    if wanted[0]:
        dx_bytes = rows.shape[1] * item_bytes
    single = (3 * BACKWARD_BYTES + sum_bytes) // max(1, 2 * row_bytes - dx_bytes)
    return single if rows.shape[0] <= single else size
