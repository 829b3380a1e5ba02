"""The definition of varlen_attention in blocks of always the same size: each sum is of as many
numbers, in an order that depends on the places of query and key in their document alone.

Its products are between BLOCK queries and BLOCK keys, which zeros complete. What is computed with a
block is always computed with tensors of the same shapes, strides and alignment, so PyTorch's
operators are taken as they are there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...invariant_mode import as_they_are

BLOCK = 64


class _Document(NamedTuple):
    """The tokens of a document, the number of those that are keys, and the keys of a mask."""

    tokens: slice
    length: int
    keys: int
    key_mask: Tensor | None


def forward(call: Any, dtype: torch.dtype, scale: float) -> tuple[Tensor, Tensor]:
    """Return y and lse of a call of varlen_attention_forward, computed in `dtype`."""
    T, H, _ = call.query.shape
    y = call.query.new_zeros((T, H, call.value.shape[2]))
    sinks = None if call.sinks is None else call.sinks.to(dtype).view(H, 1)
    # Those of tokens of no document.
    lse = torch.full((H, T), -float("inf"), dtype=dtype, device=y.device)
    if sinks is not None:
        lse[:] = sinks
    for document in _documents(call):
        operands = _Operands(call, document, dtype, scale)
        for first in range(0, document.length, BLOCK):
            with as_they_are:
                mixed, lse_of_block = _attend(operands, first, sinks)
            size = min(BLOCK, document.length - first)
            tokens = slice(document.tokens.start + first, document.tokens.start + first + size)
            y[tokens] = mixed[:, :size].transpose(0, 1).to(y.dtype)
            lse[:, tokens] = lse_of_block[:, :size]
    return y, lse


def _attend(operands: _Operands, first: int, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return y and lse of the queries of the block that begins at `first`."""
    query = operands.queries(operands.query, first)
    lowest = torch.finfo(query.dtype).min
    largest = query.new_full(query.shape[:2], lowest)
    total = torch.zeros_like(largest)
    mixed = query.new_zeros((*query.shape[:2], operands.value.shape[2]))
    for start in operands.blocks_of_keys(first):
        scores, _, seen = operands.scores(query, first, start)
        scores = torch.where(seen, scores, -float("inf"))
        higher = torch.maximum(largest, scores.amax(-1))
        p = (scores - higher.unsqueeze(-1)).exp()
        decay = (largest - higher).exp()
        total = total * decay + p.sum(-1)
        mixed = mixed * decay.unsqueeze(-1) + p @ operands.keys(operands.value, start)
        largest = higher
    if sinks is not None:
        higher = torch.maximum(largest, sinks)
        decay = (largest - higher).exp()
        total = total * decay + (sinks - higher).exp()
        mixed, largest = mixed * decay.unsqueeze(-1), higher
    divisor = torch.where(total == 0, 1.0, total)
    lse = torch.where(total == 0, -float("inf"), largest + divisor.log())
    return mixed / divisor.unsqueeze(-1), lse


def backward(call: Any, dtype: torch.dtype, scale: float) -> list[Tensor | None]:
    """Return the gradients of query, key, value and sinks, in `dtype`, from y and lse."""
    dquery, dkey, dvalue = (
        torch.zeros(x.shape, dtype=dtype, device=x.device)
        for x in (call.query, call.key, call.value)
    )
    delta = (call.dy.to(dtype) * call.y.to(dtype)).sum(-1).mT
    lse = call.lse.to(dtype)
    for document in _documents(call):
        operands = _Operands(call, document, dtype, scale)
        dy = operands.padded(call.dy)
        padding = (0, dy.shape[1] - document.length)
        of_document = [F.pad(x[:, document.tokens], padding) for x in (lse, delta)]
        gradients = [torch.zeros_like(x) for x in (operands.query, operands.key, operands.value)]
        for first in range(0, document.length, BLOCK):
            of_queries = [operands.queries(x, first) for x in (operands.query, dy, *of_document)]
            for start in operands.blocks_of_keys(first):
                with as_they_are:
                    parts = _gradients_of_block(operands, first, start, *of_queries)
                for gradient, at, part in zip(gradients, (first, start, start), parts, strict=True):
                    gradient[:, at : at + BLOCK] += part
        outputs = (dquery, dkey, dvalue)
        for output, gradient in zip(outputs, gradients, strict=True):
            output[document.tokens] = gradient[:, : document.length].transpose(0, 1)
    dsinks = None if call.sinks is None else gradient_of_sinks(call, delta)
    return [dquery, dkey, dvalue, dsinks]


def gradient_of_sinks(call: Any, delta: Tensor) -> Tensor:
    """Return the gradient of the sinks of a call of varlen_attention_backward, from dy . y.

    Where a query sees no key, lse is the sink, and y is 0. Its dy adds nothing, whatever it holds:
    at a token of no document it may be NaN. The sink may be minus infinity.
    """
    sinks, lse = call.sinks.to(delta.dtype).view(-1, 1), call.lse.to(delta.dtype)
    sees_none = (lse == sinks) & (call.y == 0).all(-1).mT
    return -torch.where(sees_none, 0.0, (sinks - lse).exp() * delta).sum(-1)


def _gradients_of_block(
    operands: _Operands, first: int, start: int, query: Tensor, dy: Tensor, lse: Tensor,
    delta: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return what the queries of the block at `first` and the keys of the block at `start` add to
    the gradients of query, key and value."""
    scores, slope, seen = operands.scores(query, first, start)
    p = torch.where(seen, (scores - lse.unsqueeze(-1)).exp(), 0.0)
    dp = dy @ operands.keys(operands.value, start).mT
    ds = p * (dp - delta.unsqueeze(-1)) * slope * operands.scale
    ds = torch.where(seen, ds, 0.0)
    return (
        ds @ operands.keys(operands.key, start),
        operands.of_key_heads(ds.mT @ query),
        operands.of_key_heads(p.mT @ dy),
    )


def _documents(call: Any) -> Iterator[_Document]:
    bounds = [min(max(bound, 0), call.query.shape[0]) for bound in call.cu_seqlens.tolist()]
    lengths = None if call.lengths is None else call.lengths.tolist()
    for i, (start, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
        if end > start:
            keys = end - start if lengths is None else min(max(lengths[i], 0), end - start)
            mask = None if call.key_mask is None else call.key_mask[start:end]
            yield _Document(slice(start, end), end - start, keys, mask)


class _Operands:
    """The query, key and value of a document, (H or H', tokens, columns), completed to whole
    blocks."""

    def __init__(self, call: Any, document: _Document, dtype: torch.dtype, scale: float) -> None:
        self.call, self.document, self.dtype, self.scale = call, document, dtype, scale
        self.query, self.key, self.value = map(self.padded, (call.query, call.key, call.value))
        # A token that is no key is 0: so nothing depends on it, whatever it holds.
        is_key = torch.arange(self.key.shape[1], device=self.key.device) < document.keys
        if document.key_mask is not None:
            is_key = is_key & F.pad(document.key_mask, (0, -document.length % BLOCK))
        self.key, self.value = (
            torch.where(is_key[:, None], x, 0.0) for x in (self.key, self.value)
        )
        self.group = call.query.shape[1] // call.key.shape[1]

    def padded(self, x: Tensor) -> Tensor:
        document = self.document
        rows = x[document.tokens].transpose(0, 1).to(self.dtype)
        return F.pad(rows, (0, 0, 0, -document.length % BLOCK))

    def queries(self, x: Tensor, first: int) -> Tensor:
        return x[:, first : first + BLOCK].clone(memory_format=torch.contiguous_format)

    def keys(self, x: Tensor, start: int) -> Tensor:
        return x[:, start : start + BLOCK].repeat_interleave(self.group, 0)

    def of_key_heads(self, x: Tensor) -> Tensor:
        """Sum the gradients of the heads that share one of key."""
        return x.unflatten(0, (-1, self.group)).sum(1)

    def blocks_of_keys(self, first: int) -> range:
        """Return the first key of each block of keys that a query of a block may see."""
        left, right = self.call.window_left, self.call.window_right
        low = 0 if left < 0 else max(first - left, 0)
        last = min(first + BLOCK, self.document.length) - 1
        high = self.document.keys if right < 0 else min(self.document.keys, last + right + 1)
        return range(low // BLOCK * BLOCK, high, BLOCK)

    def scores(
        self, query: Tensor, first: int, start: int
    ) -> tuple[Tensor, Tensor | float, Tensor]:
        """Return the scores of a block, the slope of their cap, and which are seen."""
        scores: Tensor = query @ self.keys(self.key, start).mT * self.scale
        slope: Tensor | float = 1.0
        softcap = self.call.softcap
        if softcap is not None:
            capped = torch.tanh(scores / softcap)
            scores, slope = capped * softcap, 1 - capped * capped
        place = torch.arange(BLOCK, device=query.device)
        i, j = (first + place).unsqueeze(1), start + place
        seen = j < self.document.keys
        if self.call.window_left >= 0:
            seen = seen & (j >= i - self.call.window_left)
        if self.call.window_right >= 0:
            seen = seen & (j <= i + self.call.window_right)
        if self.document.key_mask is not None:
            mask = self.document.key_mask[start : start + BLOCK]
            seen = seen & F.pad(mask, (0, BLOCK - mask.shape[0]))
        return scores, slope, seen.expand(BLOCK, BLOCK)
