"""Attention masks that depend on data: padding, documents, positions; and windows and chunks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from causal_masks import causal, columns, rows
from liger_ops.ops.attention import documents as documents_of_rows
from liger_ops.rewrites.attention import masked_attention

BATCH = 2


def right_padding(length: int) -> Tensor:
    """Return a collator's attention_mask; a third of the second row is padding."""
    mask = torch.ones(BATCH, length, dtype=torch.int64)
    mask[1, length - length // 3 :] = 0
    return mask


def documents(length: int) -> Tensor:
    """Return the ids of documents of different lengths, one of a single token, growing in a row."""
    starts = torch.zeros(BATCH, length, dtype=torch.int64)
    starts[0, [length // 3, length // 3 + 1]] = 1
    starts[1, length // 2] = 1
    return starts.cumsum(-1)


def positions(length: int) -> Tensor:
    """Return the position_ids of packed documents."""
    ids = documents(length)
    return torch.stack([torch.cat([torch.arange(int(n)) for n in row.bincount()]) for row in ids])


def prefixes(length: int) -> Tensor:
    return torch.tensor([length // 4, length // 2])


def _padded(q: int, k: int, mask: Tensor) -> Tensor:
    return causal(q, k) & mask.bool()[:, None, None, :]


def _by_index(q: int, k: int, mask: Tensor) -> Tensor:
    """Return the mask in transformers' spelling, which reads it by index tensors."""
    batch = torch.arange(mask.shape[0])[:, None, None, None]
    return causal(q, k) & mask.to(torch.bool)[batch, torch.arange(k)[None, None, None, :]]


def _packed(q: int, k: int, ids: Tensor) -> Tensor:
    return causal(q, k) & (ids[:, None, :, None] == ids[:, None, None, :])


def _packed_positions(q: int, k: int, positions: Tensor) -> Tensor:
    before = positions[:, :1] - 1
    ids = (torch.diff(positions, prepend=before, dim=-1) != 1).cumsum(-1)
    return _packed(q, k, ids) & (positions[:, None, None, :] <= positions[:, None, :, None])


def _window_of_positions(q: int, k: int, positions: Tensor) -> Tensor:
    """Return the mask of transformers 5.24, which asks positions for the window."""
    distance = positions[:, None, :, None] - positions[:, None, None, :]
    return _packed_positions(q, k, positions) & (distance < 6)


def _after_left_padding(q: int, k: int, mask: Tensor) -> Tensor:
    """Return Llama 4's mask: chunks are counted from the first token that is not padding."""
    left = (mask.cumsum(-1) == 0).sum(-1)[:, None, None, None]
    chunk_of_key = (torch.arange(k)[None, None, None, :] - left) // 5
    chunk_of_query = (torch.arange(q)[None, None, :, None] - left) // 5
    return _padded(q, k, mask) & (chunk_of_key == chunk_of_query)


Mask = Callable[..., Tensor]
# Name -> the mask, and the function that makes its data for a length, if it depends on data.
MASKS: dict[str, tuple[Mask, Callable[[int], Tensor] | None]] = {
    "window": (lambda q, k: causal(q, k) & (rows(q) - columns(k) < 6), None),
    "window of one": (lambda q, k: rows(q) == columns(k), None),
    "chunks": (lambda q, k: causal(q, k) & (rows(q) // 5 == columns(k) // 5), None),
    "both directions": (lambda q, k: (rows(q) - columns(k)).abs() < 4, None),
    "window, added": (
        lambda q, k: torch.zeros(q, k).masked_fill(
            ~causal(q, k) | (rows(q) - columns(k) >= 6), torch.finfo(torch.float32).min
        ),
        None,
    ),
    "padding": (_padded, right_padding),
    "padding on the left": (_padded, lambda n: right_padding(n).flip(-1)),
    "padding by index": (_by_index, right_padding),
    "padding, no causal": (lambda q, k, mask: mask.bool()[:, None, None, :], right_padding),
    "bool": (lambda q, k, mask: causal(q, k) & mask[:, None, None], lambda n: right_padding(n) > 0),
    "packed": (_packed, documents),
    "packed, int32": (_packed, lambda n: documents(n).int()),
    "packed by positions": (_packed_positions, positions),
    "packed by positions, a window": (_window_of_positions, positions),
    "packed and a window": (
        lambda q, k, ids: _packed(q, k, ids) & (rows(q) - columns(k) < 6),
        documents,
    ),
    "prefix": (lambda q, k, n: causal(q, k) | (columns(k) < n[:, None, None, None]), prefixes),
    "chunks after padding": (_after_left_padding, lambda n: right_padding(n).flip(-1)),
}


def on_the_cpu(monkeypatch: Any, least_keys: int = 1, has_flex: bool = True) -> None:
    """Let the rewrite run on a CPU, where flex_attention computes dense scores. Without `has_flex`
    it is as on an NPU."""
    monkeypatch.setattr(masked_attention, "DEVICES", {"cpu": has_flex})
    if not has_flex:
        monkeypatch.setattr(documents_of_rows, "ON_HOST", "cpu")
    monkeypatch.setattr(masked_attention, "LEAST_KEYS", least_keys)
    dtypes = (torch.float32, torch.bfloat16)
    monkeypatch.setattr(masked_attention, "FLASH_DTYPES", dtypes)
