"""varlen_attention, neighborhood_attention and multi_token_attention."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import liger_ops

from .entry import MODELS, TOKENS, Draw, Entry, Function, Shape, moved, peer

# The window of the figures. Every model here has one dimension.
WINDOW = 129


def masked_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Compute attention with an L x L mask of the windows."""
    positions = torch.arange(query.shape[2], device=query.device)
    mask = (positions[:, None] - positions).abs() <= WINDOW // 2
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)


def windowed_truth(
    definition: Function, tensors: Sequence[Tensor], dys: Sequence[Tensor]
) -> list[Tensor]:
    """Compute the op's definition in float64. The models' code would need a mask and scores that
    fit no device for 32768 tokens."""
    query, key, value = (tensor.detach().double().requires_grad_() for tensor in tensors)
    y = liger_ops.neighborhood_attention(query, key, value, WINDOW)
    grads = torch.autograd.grad(y, (query, key, value), dys[0].double())
    return [y.detach(), *grads]


@functools.cache
def _compiled_flex_attention() -> Function:
    return torch.compile(flex_attention, dynamic=False)


def document_attention(query: Tensor, key: Tensor, value: Tensor, documents: Tensor) -> Tensor:
    """Compute causal attention of each document: on a GPU by flex_attention, compiled, with a mask
    of blocks, and elsewhere with a T x T mask."""
    T = query.shape[0]
    ids = torch.searchsorted(documents, torch.arange(T, device=query.device), right=True)

    def is_visible(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return (ids[query] == ids[key]) & (query >= key)

    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
    if query.is_cuda:
        mask = create_block_mask(is_visible, None, None, T, T, device=query.device)
        y = _compiled_flex_attention()(q, k, v, block_mask=mask, enable_gqa=True)
    else:
        positions = torch.arange(T, device=query.device)
        dense = is_visible(0, 0, positions[:, None], positions)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=dense, enable_gqa=True)
    return y.squeeze(0).transpose(0, 1)


def ours_of_documents(query: Tensor, key: Tensor, value: Tensor, documents: Tensor) -> Tensor:
    longest = _longest(query.shape[0], documents.shape[0] - 1)
    return liger_ops.varlen_attention(query, key, value, documents, longest)


def truth_by_documents(
    definition: Function, tensors: Sequence[Tensor], dys: Sequence[Tensor]
) -> list[Tensor]:
    """Compute each document alone in float64. All scores together would fit no device."""
    *inputs, documents = tensors
    results: list[list[Tensor]] = []
    for start, end in pairwise(documents.tolist()):
        leaves = [x[start:end].detach().double().requires_grad_() for x in inputs]
        query, key, value = (x.transpose(0, 1) for x in leaves)
        y = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        y = y.transpose(0, 1)
        grads = torch.autograd.grad(y, leaves, dys[0][start:end].double())
        results.append([y.detach(), *grads])
    return [torch.cat(parts) for parts in zip(*results, strict=True)]


def _longest(T: int, count: int) -> int:
    """Return the length that none of the drawn documents exceeds."""
    return T // count * 3 // 2


def _documents(draw: Draw, shape: Shape) -> list[Tensor]:
    """Draw queries, keys and values as a projection gives them, and documents of 1/2 to 3/2 of
    their mean length."""
    T, count, heads, key_heads, width = shape
    length = T // count
    cuts = torch.arange(count + 1, device=draw.device) * length
    moves = torch.randint(length // 2, (count - 1,), generator=draw.generator, device=draw.device)
    cuts[1:-1] += moves - length // 4
    cuts[-1] = T
    return [
        *(draw.leaf(T, n, width) for n in (heads, key_heads, key_heads)), cuts.int()
    ]  # fmt: skip


def _pairs(shape: Shape) -> int:
    """Return the least number of products of a query's element with one of a key that it sees:
    that of documents of one length."""
    T, count, heads, _, width = shape
    return T * T // (2 * count) * heads * width


def _inputs(draw: Draw, shape: Shape) -> list[Tensor]:
    """Draw queries, keys and values as attention gets them from a projection: transposed views."""
    batch, length, heads, width = shape
    return [
        draw.normal(batch, length, heads, width).transpose(1, 2).requires_grad_() for _ in range(3)
    ]


def _liger_attention(package: Any) -> Function:
    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        batch, heads, length, _ = query.shape
        if batch * heads * length**2 >= 2**31:
            # On an H200, 32768 tokens of 8 heads: "an illegal memory access was encountered".
            raise RuntimeError("Liger-Kernel's offsets of the scores are int32, and overflow")
        return package.liger_fused_neighborhood_attention(query, key, value, WINDOW)

    return attention


def model_multi_token(scores: Tensor, weight: Tensor) -> Tensor:
    future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    p = F.softmax(scores.masked_fill(future, -torch.inf), -1)
    return F.conv2d(p, weight, padding=1).masked_fill(future, 0.0)


def _scores(draw: Draw, shape: Shape) -> list[Tensor]:
    """Draw scores, and a kernel that mixes all heads over 3 queries and 3 keys."""
    batch, heads, length = shape
    scale = (9 * heads) ** -0.5
    return [draw.leaf(batch, heads, length, length), draw.leaf(heads, heads, 3, 3, scale=scale)]


def _moved_scores(shape: Shape) -> dict[str, int]:
    """Return the least number of elements to move: scores, result, kernel and their gradients."""
    batch, heads, length = shape
    scores, kernel = batch * heads * length**2, 9 * heads**2
    return moved(2 * scores + kernel, 3 * scores + 2 * kernel)


ENTRIES = (
    Entry(
        op="varlen_attention",
        ours=ours_of_documents,
        eager=document_attention,
        dims=("T", "documents", "heads", "key_heads", "D"),
        inputs=_documents,
        # Two products forward, and five backward.
        passes={"forward": 4, "backward": 10, "full": 14},
        elements=_pairs,
        is_matrix_product=True,
        figures=tuple((16384, count, 32, 8, 128) for count in (2, 16, 128)),
        models={
            name: (TOKENS, 4, *MODELS[name].heads)
            for name in ("llama-3.1-8b", "gemma3-4b", "gpt-oss-20b")
        },
        small=(512, 4, 8, 2, 64),
        truth=truth_by_documents,
    ),
    Entry(
        op="neighborhood_attention",
        ours=lambda query, key, value: liger_ops.neighborhood_attention(query, key, value, WINDOW),
        eager=masked_attention,
        peers={"liger-kernel": _liger_attention},
        dims=("batch", "L", "heads", "D"),
        inputs=_inputs,
        # A query takes part in fewer operations than a GPU does while it moves the tensors once.
        passes=moved(4, 7),
        figures=((1, 4096, 8, 64), (1, 8192, 8, 64), (1, 32768, 8, 64)),
        models={},
        small=(1, 512, 8, 64),
        truth=windowed_truth,
    ),
    Entry(
        op="multi_token_attention",
        ours=lambda scores, weight: liger_ops.multi_token_attention(scores, weight, padding=1),
        eager=model_multi_token,
        peers={"liger-kernel": peer("liger_multi_token_attention", padding=1)},
        dims=("batch", "heads", "L"),
        inputs=_scores,
        counts=_moved_scores,
        # Liger-Kernel's own figures have a batch of 2 and 4 heads.
        figures=((2, 4, 2048), (2, 4, 8192), (1, 16, 4096)),
        models={},
        small=(2, 4, 256),
    ),
)
