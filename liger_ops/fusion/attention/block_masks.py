"""The block masks of eager models after `fuse`, and masks in their dense form.

A block mask is made of any predicate of indices, without a dense mask in memory: a function that
takes tensors of batch, head, query and key indices that broadcast, and returns whether the query
attends to the key. Eager code evaluates a few rows of blocks at a time (`ELEMENTS`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from ...ops.attention.documents import Documents, called
from ...rewrites.attention.mask.blocks import (
    BATCH,
    BLOCK,
    HEADS,
    KEYS,
    QUERIES,
    block_lists,
    unseen_queries,
)

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class AnnotatedBlockMask(BlockMask):
    """A block mask of flex_attention, with a fact that it does not hold.

    Attributes:
        unseen: (batch, queries), True for the queries that see no key, if these are to get the mean
            of all values. The mask that flex_attention gets shows them all keys.
    """

    unseen: Tensor | None = None

    def contiguous(self) -> AnnotatedBlockMask:
        """Return itself: generate() calls this method of every mask that it prepares."""
        return self


# The most elements of a dense mask that eager code holds at a time: 64 MiB of bool.
ELEMENTS = 2**26


def block_mask(
    visible: MaskFunction, batch: int, queries: int, keys: int, device: torch.device,
    *, gives_means: bool = False,
) -> AnnotatedBlockMask:  # fmt: skip
    """Create the block mask of a mask function, for all heads. Sizes may be symbols while tracing.

    If the mask function does not read the batch index, all rows of the batch share one mask. With
    `gives_means`, queries that see no key are to get the mean of all values.
    """
    sizes, unseen, shown = {BATCH: batch, HEADS: 1, QUERIES: queries, KEYS: keys}, None, visible
    if gives_means:
        is_unseen = unseen_queries(called, visible, sizes, device, _rows(batch * keys))
        unseen = is_unseen[:, 0].expand(batch, queries)

        def shown(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return visible(b, h, q, k) | unseen[b, q]

    rows = _rows(batch * (keys + BLOCK) * BLOCK)
    lists: Any = block_lists(called, shown, sizes, device, rows)
    mask = AnnotatedBlockMask(
        seq_lengths=(queries, keys), BLOCK_SIZE=(BLOCK, BLOCK), mask_mod=shown, **lists
    )
    mask.unseen = unseen
    return mask


def _rows(elements: int) -> int | None:
    """Return the number of rows of this many elements to hold at a time, or None for all rows, if
    the code is compiled."""
    return None if torch.compiler.is_compiling() else max(1, ELEMENTS // elements)


def dense(mask: BlockMask | Documents, batch: int, length: int) -> Tensor:
    """Return the boolean mask (batch, 1, length, length) of a block mask from `block_mask`, or of
    documents."""
    if isinstance(mask, Documents):
        return _dense_documents(mask, batch, length)
    device = mask.kv_num_blocks.device
    b, q = (torch.arange(n, device=device) for n in (mask.kv_num_blocks.shape[0], length))
    visible = mask.mask_mod(b[:, None, None, None], b.new_zeros(1, 1, 1, 1), q[:, None], q[None, :])
    if isinstance(mask, AnnotatedBlockMask) and mask.unseen is not None:
        visible = visible & ~mask.unseen[:, None, :, None]
    return visible.expand(batch, 1, length, length)


def _dense_documents(documents: Documents, batch: int, length: int) -> Tensor:
    tokens = torch.arange(batch * length, device=documents.cu_seqlens.device)
    document = torch.searchsorted(documents.cu_seqlens, tokens, right=True).view(batch, 1, -1, 1)
    q = tokens[:length]
    visible = (document == document.mT) & (q <= q[:, None])
    if documents.window_left >= 0:
        visible = visible & (q >= q[:, None] - documents.window_left)
    if documents.key_mask is not None:
        visible = visible & documents.key_mask.view(batch, 1, 1, length)
    return visible
