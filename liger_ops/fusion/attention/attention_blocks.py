"""Block masks of flex_attention for any predicate of indices, without a dense mask in memory.

A mask function takes tensors of batch, head, query and key indices that broadcast, and returns
whether the query attends to the key. Eager code evaluates a few rows of blocks at a time
(`ELEMENTS`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from ...rewrites.attention.mask.blocks import (
    BATCH,
    BLOCK,
    HEADS,
    KEYS,
    QUERIES,
    block_lists,
    called,
    unseen_queries,
)

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class AnnotatedBlockMask(BlockMask):
    """A block mask of flex_attention, with two facts that the engines need.

    Attributes:
        window: the size of the sliding window, if the mask is a causal window and nothing else.
        unseen: (batch, queries), True for the queries that see no key, if these are to get the mean
            of all values. The mask that flex_attention gets shows them all keys.
    """

    window: int | None = None
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


def dense(mask: BlockMask) -> Tensor:
    """Return the boolean mask (batch, 1, queries, keys) of a block mask from `block_mask`."""
    queries, keys = mask.seq_lengths
    device = mask.kv_num_blocks.device
    b, q, k = (torch.arange(n, device=device) for n in (mask.kv_num_blocks.shape[0], queries, keys))
    visible = mask.mask_mod(b[:, None, None, None], b.new_zeros(1, 1, 1, 1), q[:, None], k[None, :])
    if isinstance(mask, AnnotatedBlockMask) and mask.unseen is not None:
        visible = visible & ~mask.unseen[:, None, :, None]
    return visible.expand(mask.kv_num_blocks.shape[0], 1, queries, keys)
