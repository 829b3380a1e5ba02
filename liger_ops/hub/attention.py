"""Attention of transformers' models, by `varlen_attention` and PyTorch's own kernels."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops.attention.documents import Documents, attend, called, packed_rows, padded_rows, rows
from ..ops.attention.varlen_attention import FLASH_DTYPES, FLASH_HEAD_DIM


def attention_mask(
    batch_size: int, q_length: int, kv_length: int,
    q_offset: int | Tensor = 0, kv_offset: int | Tensor = 0,
    mask_function: Callable[..., Any] | None = None, attention_mask: Tensor | None = None,
    device: Any = "cpu", use_vmap: bool = False, allow_is_bidirectional_skip: bool = False,
    **others: Any,
) -> Tensor | None:  # fmt: skip
    """Return what `attention` takes as its mask: the batch's own mask of the keys, (B, K), up to
    the last one that is filled where a cache has room for more; None if all are seen.

    It is a function that transformers' `AttentionMaskInterface` registers. That for
    "flash_attention_2" gives the same mask but looks at its data, which breaks a graph. It does not
    look at mask_function either: causal masks, windows and documents are told to `attention`.

    Raises:
        ValueError: mask_function is none of these, as for the tokens of an image that see each
            other. Where it is traced, only masks that a model passes as its own are noticed.
    """
    if use_vmap or (not torch.compiler.is_compiling() and _has_alternatives(mask_function)):
        raise ValueError(
            "attention_mask: the model shows other keys than those of a causal mask, a window,"
            " padding and documents, which attention does not compute"
        )
    if attention_mask is not None:
        attention_mask = attention_mask != 0
    if allow_is_bidirectional_skip:
        # The keys may be those of an encoder.
        return attention_mask
    filled = q_length
    if kv_length != q_length:
        filled = int(q_offset) + q_length - int(kv_offset)
    if attention_mask is None:
        if filled >= kv_length:
            return None
        return torch.ones((batch_size, filled), dtype=torch.bool, device=device)
    if attention_mask.shape[1] == filled:
        # Also where generate has called this function, and the model calls it again.
        return attention_mask
    first = int(kv_offset)
    padded = F.pad(attention_mask, (0, max(first + filled - attention_mask.shape[1], 0)))
    return padded[:, first : first + filled]


def _has_alternatives(mask_function: Any) -> bool:
    """Return whether a mask function of transformers shows what one of several functions shows."""
    if isinstance(mask_function, tuple):
        return any(map(_has_alternatives, mask_function))
    if not isinstance(mask_function, FunctionType):
        return False
    cells = mask_function.__closure__ or ()
    return mask_function.__name__ == "or_mask" or any(
        _has_alternatives(cell.cell_contents) for cell in cells
    )


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

    As for "flash_attention_2", a query sees keys at a distance below the window, and the documents
    of a packed batch are those of cu_seq_lens_q or, if position_ids have a row for each row of the
    batch and there is no mask, begin where a position is not its predecessor plus one: also in
    models whose own attention reads no documents in positions, and where a cache is filled.

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
            cu_seq_lens_q it has dropout, a mask or a cache, or is not causal.
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
    # A comparison of sizes that are symbols is one, too.
    is_whole = True if length == key.shape[2] == filled else False  # noqa: SIM210
    begins = None
    if is_whole and causal and attention_mask is None and cu_seq_lens_q is None:
        begins = _begins(query, position_ids)
    options = (attention_mask, cu_seq_lens_q, begins, softcap, s_aux)
    is_plain = window < 0 and all(option is None for option in options)
    if is_plain and (is_whole or length == 1):
        # The only query of a step of generation sees all keys.
        return _by_pytorch(query, key, value, dropout, scaling, causal and is_whole), None
    is_fast = is_whole and causal and not dropout
    if cu_seq_lens_q is not None and (not is_fast or attention_mask is not None):
        raise ValueError(
            "attention: with cu_seq_lens_q it is causal, without dropout, mask and cache, got"
            f" is_causal={causal}, dropout={dropout}, {length} queries, {key.shape[2]} keys and"
            f" a mask of {'None' if attention_mask is None else tuple(attention_mask.shape)}"
        )
    if not is_fast:
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
    is_grouped = query.dtype in FLASH_DTYPES and query.shape[-1] <= FLASH_HEAD_DIM
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
    scores = (grouped @ key.mT).unflatten(2, (-1, length)).flatten(1, 2)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    scores = scores * (query.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
    if sinks is not None:
        column = sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], -1)
    weights = scores.softmax(-1)[..., : key.shape[2]].masked_fill(~visible, 0.0)
    weights = F.dropout(weights.to(value.dtype), dropout)
    y = weights.unflatten(1, (heads, -1)).flatten(2, 3) @ value
    return y.unflatten(2, (-1, length)).flatten(1, 2).transpose(1, 2).contiguous()
