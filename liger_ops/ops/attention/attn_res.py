"""Attention over the depth of a model, in place of residual connections."""

from __future__ import annotations

import torch
from torch import Tensor

from ... import library
from ...accepted import AT_LEAST_0
from ..rows import WHOLE, RowStatistics
from ..tensors import widened


@library.define(axes="x=N * D, query=D, weight=D -> y=* D", options={"eps": AT_LEAST_0})
def attn_res(
    x: Tensor, query: Tensor, weight: Tensor | None = None, eps: float = 1e-6,
    *, rows: RowStatistics = WHOLE,
) -> Tensor:  # fmt: skip
    """Average the blocks' outputs, weighted by a softmax over the blocks: attention residuals.

    For each token, with x[i] the output of block i, and norm(x) = x / sqrt(mean(x**2) + eps):

        score[i] = sum(query * weight * norm(x[i]))
        y = sum over i of softmax(score)[i] * x[i]

    Everything is computed in float32, and only y is rounded; model code also rounds norm(x) and its
    product with weight. The gradients of query and weight are summed over blocks and tokens in
    float32, in an order that does not change between runs. The backward recomputes the scores: only
    the inputs are saved. On a GPU the forward reads x once if D is at most 8192, else twice; the
    backward reads it twice and holds six float32 numbers for each block of a token.

    Under autocast the op runs in the dtypes of its inputs. float64 runs the definition on every
    device.

    Args:
        x: (N, ..., D), floating point: N blocks, any number of them, and any width.
        query: (D,), floating point; its dtype may differ from x's.
        weight: (D,), floating point, the weight of the norm; None for 1.
        eps: added to the mean square.

    Returns:
        (..., D), contiguous, of x's dtype.

    Raises:
        TypeError: a tensor is not floating point.
        ValueError: x has fewer than two dimensions or no block, query or weight is not (D,), the
            devices differ, or eps is negative.

    Source: Kimi Team, "Attention Residuals", 2026.

    Example:
        >>> blocks = torch.tensor([[[1.0, 1.0]], [[3.0, -3.0]]])
        >>> liger_ops.attn_res(blocks, torch.tensor([0.0, 0.0]))
        tensor([[ 2., -1.]])
    """
    wide = widened(x)
    factor = query.to(wide.dtype)
    if weight is not None:
        factor = factor * weight.to(wide.dtype)
    score = rows.total(wide * factor) * torch.rsqrt(rows.mean(wide * wide) + eps)
    alpha = torch.softmax(score, 0)
    return (alpha * wide).sum(0).to(x.dtype).contiguous()


attn_res_backward = library.derive_backward(
    "attn_res", "dy x query weight eps output_mask -> dx dquery dweight"
)
