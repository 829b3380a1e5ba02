"""Attention of queries that follow a cache, within `liger_ops.invariant`.

A query has the bits that it has in the whole sequence if it stands at its own place there: each row
of the batch is completed to all tokens so far, with queries before the new ones, and with keys
before those that a sliding window's cache keeps, which no new query sees. So a new token costs the
attention of all tokens.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...ops.attention.documents import Documents, attend, called, padded_rows, rows


class CachedDocuments(NamedTuple):
    """A mask for queries that follow a cache.

    Attributes:
        documents: those of the rows of all tokens so far.
        length: the number of tokens of such a row.
    """

    documents: Documents
    length: int


def cached_documents(given: dict[str, Any], size: int | None) -> CachedDocuments | None:
    """Return the mask for the arguments of a mask function, with a causal window of `size` keys, or
    0 for none; None if size is None, or it is not known which keys the cache keeps."""
    if size is None or given.get("use_vmap", False):
        return None
    offset, kept_from = given.get("q_offset", 0), given.get("kv_offset", 0)
    # A static cache has its offset in a tensor.
    if not (isinstance(offset, int) and isinstance(kept_from, int)):
        return None
    length, kept_to = offset + given["q_length"], kept_from + given["kv_length"]
    # A cache with room for more tokens has them behind the last.
    if kept_to != length and (kept_from or kept_to < length):
        return None
    batch, device = given["batch_size"], torch.device(given["device"])
    padding = given.get("attention_mask")
    if padding is None:
        documents = rows(called, batch, length, device)
    elif padding.dim() == 2 and padding.shape[1] >= length:
        documents = padded_rows(called, padding[:, :length] != 0, batch, length, device)
    else:
        return None
    return CachedDocuments(documents._replace(window_left=size - 1 if size else -1), length)


def attend_cached(
    operands: tuple[Tensor, Tensor, Tensor], mask: CachedDocuments,
    scale: float | None, softcap: float | None, sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """Compute causal attention of (batch, heads, tokens, D), where query is of the new tokens, and
    key and value are of the cache: (batch, new tokens, heads, D)."""
    batch, _, new, _ = operands[0].shape
    whole = tuple(_completed(x, mask.length) for x in operands)
    y = attend(called, whole, mask.documents, batch, mask.length, scale, softcap, sinks)
    return y[:, -new:]


def _completed(x: Tensor, length: int) -> Tensor:
    return F.pad(x[:, :, :length], (0, 0, max(length - x.shape[2], 0), 0))
