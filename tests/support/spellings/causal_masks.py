"""Causal masks, and a check of attention with a mask against attention without the pass."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from attention_graphs import checked
from liger_ops.rewrites.attention import causal_attention

OP = "causal_attention"
LENGTH = 6
Mask = Callable[[int, int], Tensor]


def rows(n: int) -> Tensor:
    return torch.arange(n)[:, None]


def columns(n: int) -> Tensor:
    return torch.arange(n)[None, :]


def causal(q: int, k: int) -> Tensor:
    return columns(k) <= rows(q)


def transformers_packed(q: int, k: int) -> Tensor:
    """Return transformers' mask without a cache, which allows that position ids are packed."""
    positions = torch.arange(q)[None].expand(2, -1)
    first = positions[:, :1] - 1
    sequence = (torch.diff(positions, prepend=first, dim=-1) != 1).cumsum(-1)
    b = torch.arange(2)[:, None, None, None]
    i, j = torch.arange(q)[None, None, :, None], torch.arange(k)[None, None, None, :]
    mask = i.new_ones((), dtype=torch.bool) & (sequence[b, i] == sequence[b, j])
    return (mask & (positions[b, j] <= positions[b, i])).expand(2, -1, q, k)


def float_mask(kept: Callable[[int, int], Tensor], low: float) -> Mask:
    return lambda q, k: torch.zeros(q, k).masked_fill(~kept(q, k), low)


def least() -> float:
    """Return float32's least number.

    A function, because with dynamic shapes a global would be a graph input.
    """
    return torch.finfo(torch.float32).min


def with_mask(mask: Mask) -> Callable[..., Tensor]:
    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        attn_mask = mask(query.shape[-2], key.shape[-2])
        return F.scaled_dot_product_attention(query, key, value, attn_mask=attn_mask)

    return attention


def check(
    function: Callable[..., Tensor],
    inputs: list[Tensor],
    count: int,
    dynamic: bool = False,
    attentions: int = 1,
) -> list[str | None]:
    """Check the number of rewritten calls and the results; return the reasons for the other calls.

    Gradients are compared if a call is rewritten, for static sizes.
    """
    gradients = bool(count) and not dynamic
    report, options = checked(function, causal_attention.rewrite, inputs, dynamic, gradients)
    assert report.counts().get(OP, 0) == count
    assert len(report.findings) == attentions
    assert sum(option.get("is_causal", False) for option in options) == count
    assert sum("attn_mask" in option for option in options) == attentions - count
    return [finding.reason for finding in report.findings]
