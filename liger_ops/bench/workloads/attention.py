"""neighborhood_attention and multi_token_attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import liger_ops

from .entry import Draw, Entry, Function, Shape, moved, peer

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
