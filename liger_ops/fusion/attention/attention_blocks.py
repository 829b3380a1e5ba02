"""Block masks of flex_attention for any predicate of indices, without a dense mask in memory.

A mask function takes tensors of batch, head, query and key indices that broadcast, and returns
which keys a query attends to. Eagerly, a few rows of blocks are evaluated at a time (`ELEMENTS`).
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


class Blocks(BlockMask):
    """A block mask. If it is a causal sliding window and nothing else, `window` is its size.

    `unseen`, (batch, queries), marks the queries that see no key, if these are to get the mean of
    all values: to flex_attention they then see all keys.
    """

    window: int | None = None
    unseen: Tensor | None = None

    def contiguous(self) -> Blocks:
        """Return itself: generate() calls this method of every mask that it prepares."""
        return self


# Elements of a dense mask that exist at a time, eagerly: 64 MiB of bool.
ELEMENTS = 2**26


def block_mask(
    visible: MaskFunction, batch: int, queries: int, keys: int, device: torch.device,
    *, gives_means: bool = False,
) -> Blocks:  # fmt: skip
    """The block mask of a mask function, for all heads. Sizes may be symbols while tracing.

    A mask function that does not read the batch index gives one for all rows of the batch. With
    `gives_means` it is for attention that gives a query that sees no key the mean of all values.
    """
    sizes, unseen, shown = {BATCH: batch, HEADS: 1, QUERIES: queries, KEYS: keys}, None, visible
    if gives_means:
        found = unseen_queries(called, visible, sizes, device, _rows(batch * keys))
        unseen = found[:, 0].expand(batch, queries)

        def shown(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return visible(b, h, q, k) | unseen[b, q]

    rows = _rows(batch * (keys + BLOCK) * BLOCK)
    lists: Any = block_lists(called, shown, sizes, device, rows)
    made = Blocks(seq_lengths=(queries, keys), BLOCK_SIZE=(BLOCK, BLOCK), mask_mod=shown, **lists)
    made.unseen = unseen
    return made


def _rows(elements: int) -> int | None:
    """How many rows of so many elements exist at a time; None for all, while they are compiled."""
    return None if torch.compiler.is_compiling() else max(1, ELEMENTS // elements)


def dense(mask: BlockMask) -> Tensor:
    """The boolean mask (batch, 1, queries, keys) of a block mask made by `block_mask`."""
    queries, keys = mask.seq_lengths
    device = mask.kv_num_blocks.device
    b, q, k = (torch.arange(n, device=device) for n in (mask.kv_num_blocks.shape[0], queries, keys))
    visible = mask.mask_mod(b[:, None, None, None], b.new_zeros(1, 1, 1, 1), q[:, None], k[None, :])
    if isinstance(mask, Blocks) and mask.unseen is not None:
        visible = visible & ~mask.unseen[:, None, :, None]
    return visible.expand(mask.kv_num_blocks.shape[0], 1, queries, keys)
