"""Attention of transformers' models, by `varlen_attention` and PyTorch's own kernels."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops.attention.documents import Documents, attend, called, packed_rows, padded_rows, rows

# PyTorch's kernels that take fewer heads of keys than of queries.
GROUPED_DTYPES, GROUPED_HEAD_DIM = (torch.float16, torch.bfloat16), 256


def attention_mask(
    batch_size: int, q_length: int, kv_length: int, q_offset: int | Tensor = 0,
    attention_mask: Tensor | None = None, device: Any = "cpu", **others: Any,
) -> Tensor | None:  # fmt: skip
    """Return what `attention` takes as its mask: the batch's own mask of (B, K); without one, ones
    for the filled keys of a cache that has room for more; or None.

    It is a function that transformers' `AttentionMaskInterface` registers. That for
    "flash_attention_2" gives the same mask but looks at its data, which breaks a graph.
    """
    if attention_mask is not None:
        return attention_mask[:, -kv_length:]
    filled = q_length if kv_length == q_length else int(q_offset) + q_length
    if filled >= kv_length:
        return None
    return torch.ones((batch_size, filled), dtype=torch.bool, device=device)


def attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None,
    dropout: float = 0.0, scaling: float | None = None, sliding_window: int | None = None,
    softcap: float | None = None, s_aux: Tensor | None = None, is_causal: bool | None = None,
    position_ids: Tensor | None = None, cu_seq_lens_q: Tensor | None = None, **others: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Compute attention as a function that transformers' `AttentionInterface` registers.

    Causal attention without a mask is PyTorch's own; with padding, packed documents, a window, a
    soft cap or sinks it is `varlen_attention`. Queries that follow a cache, dropout, and padding or
    a window where attention is not causal are computed with all scores in memory. A query that sees
    no key gets 0.

    As for "flash_attention_2", the documents of a packed batch are those of cu_seq_lens_q or, if
    position_ids have a row for each row of the batch and there is no mask, begin where a position
    is not its predecessor plus one.

    Args:
        module: the model's attention, of which `is_causal` and `config` are read.
        query: (B, H, L, D).
        key, value: (B, H', K, D) and (B, H', K, E), where H' divides H.
        attention_mask: (B, K) or (B, S) with S <= K, the keys that are filled: not 0 where a token
            is no padding. None for no padding.
        dropout: the share of weights that become 0.
        scaling: the factor of scores, None for 1 / sqrt(D).
        sliding_window: how many keys a query sees, its own included. None for all.
        softcap: the cap of scores, or None.
        s_aux: (H,), the sinks, or None.
        is_causal: None for the module's.
        position_ids: (B, L); others are not read.
        cu_seq_lens_q: (N + 1,), the first token of each of N documents of the batch's B * L tokens,
            and B * L.
        others: not read.

    Returns:
        y: (B, L, H, E), and None in place of weights.

    Raises:
        ValueError: the model's attention is in chunks; attention_mask is no matrix; or with
            cu_seq_lens_q it has dropout or a cache, or is not causal.
    """
    if getattr(getattr(module, "config", None), "attention_chunk_size", None) is not None:
        raise ValueError("attention: a config with attention_chunk_size is not supported")
    if attention_mask is not None and attention_mask.dim() != 2:
        raise ValueError(
            "attention: attention_mask must be (B, K), a number for each key, got"
            f" {tuple(attention_mask.shape)}"
        )
    causal = bool(module.is_causal if is_causal is None else is_causal)
    batch, _, length, _ = query.shape
    window = sliding_window - 1 if sliding_window and sliding_window < key.shape[2] else -1
    filled = key.shape[2] if attention_mask is None else attention_mask.shape[1]
    is_whole = length == key.shape[2] == filled
    begins = None
    if is_whole and causal and attention_mask is None and cu_seq_lens_q is None:
        begins = _begins(query, position_ids)
    options = (attention_mask, cu_seq_lens_q, begins, softcap, s_aux)
    is_plain = window < 0 and all(option is None for option in options)
    if is_plain and (is_whole or length == 1):
        # The only query of a step of generation sees all keys.
        return _by_pytorch(query, key, value, dropout, scaling, causal and is_whole), None
    if not is_whole or not causal or dropout:
        if cu_seq_lens_q is not None:
            raise ValueError(
                "attention: with cu_seq_lens_q it is causal, without dropout and without a cache,"
                f" got is_causal={causal}, dropout={dropout}, {length} queries and"
                f" {key.shape[2]} keys"
            )
        visible = _visible(query, key, attention_mask, begins, window, causal)
        return _with_scores(query, key, value, visible, scaling, softcap, s_aux, dropout), None
    if cu_seq_lens_q is not None:
        documents = Documents(cu_seq_lens_q)
    elif begins is not None:
        documents = packed_rows(called, begins, query.device)
    elif attention_mask is not None:
        documents = padded_rows(called, attention_mask != 0, batch, length, query.device)
    else:
        documents = rows(called, batch, length, query.device)
    documents = documents._replace(window_left=window)
    operands = (query, key, value)
    return attend(called, operands, documents, batch, length, scaling, softcap, s_aux), None


def _begins(query: Tensor, position_ids: Tensor | None) -> Tensor | None:
    """Return which tokens begin a document, (B, L), or None where positions do not tell it."""
    batch, _, length, _ = query.shape
    if position_ids is None or position_ids.shape != (batch, length):
        return None
    return F.pad(position_ids.diff() != 1, (1, 0), value=True)


def _by_pytorch(
    query: Tensor, key: Tensor, value: Tensor, dropout: float, scale: float | None, causal: bool
) -> Tensor:
    groups = query.shape[1] // key.shape[1]
    is_grouped = query.dtype in GROUPED_DTYPES and query.shape[-1] <= GROUPED_HEAD_DIM
    if groups > 1 and not is_grouped:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    y = F.scaled_dot_product_attention(
        query, key, value, dropout_p=dropout, is_causal=causal, scale=scale,
        enable_gqa=groups > 1 and is_grouped,
    )  # fmt: skip
    return y.transpose(1, 2).contiguous()


def _visible(
    query: Tensor, key: Tensor, mask: Tensor | None, begins: Tensor | None, window: int,
    causal: bool,
) -> Tensor:  # fmt: skip
    """Return which keys a query sees: (L, K) or, if rows differ, (B, 1, L, K)."""
    length, keys = query.shape[2], key.shape[2]
    # A static cache has room for more keys than are filled, which the mask has.
    filled = keys if mask is None else mask.shape[1]
    i = torch.arange(filled - length, filled, device=query.device)[:, None]
    j = torch.arange(keys, device=query.device)
    visible = (j < filled).expand(length, keys)
    if causal:
        visible = visible & (j <= i)
    if window >= 0:
        visible = visible & ((i - j).abs() <= window)
    if mask is not None:
        visible = visible & F.pad(mask != 0, (0, keys - filled))[:, None, None]
    if begins is not None:
        document = begins.cumsum(1)
        visible = visible & (document[:, :, None] == document[:, None])[:, None]
    return visible


def _with_scores(
    query: Tensor, key: Tensor, value: Tensor, visible: Tensor,
    scale: float | None, softcap: float | None, sinks: Tensor | None, dropout: float,
) -> Tensor:  # fmt: skip
    """Compute attention with all scores in memory."""
    # Queries that share a head of keys are one matrix, so that no head is copied.
    heads, length = key.shape[1], query.shape[2]
    grouped = query.unflatten(1, (heads, -1)).flatten(2, 3)
    scores = (grouped @ key.mT).float().unflatten(2, (-1, length)).flatten(1, 2)
    scores = scores * (query.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
    if sinks is not None:
        column = sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], -1)
    weights = scores.softmax(-1)[..., : key.shape[2]].masked_fill(~visible, 0.0)
    weights = F.dropout(weights.to(value.dtype), dropout)
    y = weights.unflatten(1, (heads, -1)).flatten(2, 3) @ value
    return y.unflatten(2, (-1, length)).flatten(1, 2).transpose(1, 2).contiguous()
