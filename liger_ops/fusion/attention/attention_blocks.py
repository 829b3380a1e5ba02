"""Block masks of flex_attention for any predicate of indices, without a dense mask in memory.

A mask function takes tensors of batch, head, query and key indices that broadcast, and returns
which keys a query attends to. Blocks of 128 queries and 128 keys are counted: those without a
visible key are skipped, those with only visible keys need no mask, and in the others the mask
function decides for each element. Compiled, the mask function is evaluated inside the reduction
over a block, so that no dense mask is stored. Eagerly, a few rows of blocks are evaluated at a time
(`ELEMENTS`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from ...rewrites.attention.mask.blocks import BLOCK, ordered

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
    visible: MaskFunction, batch: int, queries: int, keys: int, device: torch.device
) -> Blocks:
    """The block mask of a mask function, for all heads. Sizes may be symbols while tracing.

    A mask function that does not read the batch index gives one for all rows of the batch.
    """
    counts = _visible_in_blocks(visible, batch, queries, keys, device)
    full = counts == BLOCK * BLOCK
    partial = (counts > 0) & ~full
    parts: dict[str, Any] = {"seq_lengths": (queries, keys), "BLOCK_SIZE": (BLOCK, BLOCK)}
    for side, turn in (("kv", False), ("q", True)):
        for kind, blocks in (("", partial), ("full_", full)):
            blocks = blocks.mT if turn else blocks
            size = blocks.shape[-1]
            numbers = torch.arange(size, device=device)
            count, indices = ordered(_call, blocks, numbers, size)
            parts |= {f"{kind}{side}_num_blocks": count, f"{kind}{side}_indices": indices}
    return Blocks(mask_mod=visible, **parts)


def showing_unseen(
    visible: MaskFunction, batch: int, queries: int, keys: int, device: torch.device
) -> Blocks:
    """The block mask of a mask function, for attention that gives a query that sees no key the mean
    of all values."""
    unseen = _unseen(visible, batch, queries, keys, device)

    def seen(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return visible(b, h, q, k) | unseen[b, q]

    made = block_mask(seen, batch, queries, keys, device)
    made.unseen = unseen
    return made


def _unseen(
    visible: MaskFunction, batch: int, queries: int, keys: int, device: torch.device
) -> Tensor:
    b = torch.arange(batch, device=device).view(-1, 1, 1)
    q, k = (torch.arange(n, device=device) for n in (queries, keys))
    rows = queries if torch.compiler.is_compiling() else max(1, ELEMENTS // (batch * keys))
    parts = [
        visible(b, torch.zeros_like(b), part.view(1, -1, 1), k.view(1, 1, -1)).any(dim=-1)
        for part in q.split(rows)
    ]
    return ~torch.cat(parts, dim=-1).expand(batch, queries)


def _call(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


def dense(mask: BlockMask) -> Tensor:
    """The boolean mask (batch, 1, queries, keys) of a block mask made by `block_mask`."""
    queries, keys = mask.seq_lengths
    device = mask.kv_num_blocks.device
    b, q, k = (torch.arange(n, device=device) for n in (mask.kv_num_blocks.shape[0], queries, keys))
    visible = mask.mask_mod(b[:, None, None, None], b.new_zeros(1, 1, 1, 1), q[:, None], k[None, :])
    if isinstance(mask, Blocks) and mask.unseen is not None:
        visible = visible & ~mask.unseen[:, None, :, None]
    return visible.expand(mask.kv_num_blocks.shape[0], 1, queries, keys)


def _visible_in_blocks(
    visible: MaskFunction, batch: int, queries: int, keys: int, device: torch.device
) -> Tensor:
    """Counts, (batch, 1, blocks of queries, blocks of keys). Indices beyond a length are hidden."""
    b = torch.arange(batch, device=device).view(-1, 1, 1, 1, 1, 1)
    k = _in_blocks(keys, device).view(1, 1, 1, -1, 1, BLOCK)
    q = _in_blocks(queries, device).view(1, 1, -1, 1, BLOCK, 1)
    if torch.compiler.is_compiling():
        return _counts(visible, b, q, k, queries, keys)
    rows = max(1, ELEMENTS // (batch * BLOCK * k.numel()))
    parts = [_counts(visible, b, part, k, queries, keys) for part in q.split(rows, dim=2)]
    return torch.cat(parts, dim=2)


def _in_blocks(length: int, device: torch.device) -> Tensor:
    return torch.arange((length + BLOCK - 1) // BLOCK * BLOCK, device=device)


def _counts(
    visible: MaskFunction, b: Tensor, q: Tensor, k: Tensor, queries: int, keys: int
) -> Tensor:
    # The last block may pass the end of the data that the mask function reads.
    inside = (q < queries) & (k < keys)
    seen = visible(b, torch.zeros_like(b), q.clamp(max=queries - 1), k.clamp(max=keys - 1))
    return (seen & inside).sum(dim=(-2, -1), dtype=torch.int32)
