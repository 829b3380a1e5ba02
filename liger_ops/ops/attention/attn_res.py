"""Attention over the depth of a model, in the place of residual connections."""

from __future__ import annotations

import torch
from torch import Tensor

from ... import library
from ...accepted import AT_LEAST_0
from .. import rows
from ..precision import widened


@library.define(axes="x=N * D, query=D, weight=D -> y=* D", options={"eps": AT_LEAST_0})
def attn_res(x: Tensor, query: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """Attention residuals: the mean of the blocks' outputs, weighted by a softmax over the blocks.

    For each token, with x[i] the output of block i, and norm(x) = x / sqrt(mean(x**2) + eps):

        score[i] = sum(query * weight * norm(x[i]))
        y = sum over i of softmax(score)[i] * x[i]

    It is computed in float32, and only y is rounded; code of models also rounds norm(x) and its
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
        ValueError: a shape, a device or eps is not as above, or there is no block.

    Source: Kimi Team, "Attention Residuals", 2026.

    Example:
        >>> blocks = torch.tensor([[[1.0, 1.0]], [[3.0, -3.0]]])
        >>> liger_ops.attn_res(blocks, torch.tensor([0.0, 0.0]))
        tensor([[ 2., -1.]])
    """
    wide = widened(x)
    score = _scores(wide, _factor(wide, query, weight), _rstd(wide, eps))
    alpha = torch.softmax(score, 0)
    return (alpha * wide).sum(0).to(x.dtype).contiguous()


@library.define()
def attn_res_backward(
    dy: Tensor, x: Tensor, query: Tensor, weight: Tensor | None, eps: float, output_mask: list[bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradient of `attn_res`.

    With alpha = softmax(score), rstd = 1 / sqrt(mean(x**2) + eps) and w = query * weight:

        dalpha  = sum(dy * x)
        dscore  = alpha * (dalpha - sum of alpha * dalpha over the blocks)
        dx      = alpha * dy + dscore * rstd * (w - x * rstd * score / D)
        dw      = sum of dscore * rstd * x over blocks and tokens
        dquery  = dw * weight
        dweight = dw * query

    Args:
        dy: (..., D), any strides.
        x, query, weight, eps: as given to `attn_res`.
        output_mask: whether dx, dquery and dweight are computed and allocated.

    Returns:
        dx, dquery and dweight, contiguous, of the shapes and dtypes of x, query and weight; each
        may be None.

    Raises:
        TypeError, ValueError: as `attn_res`; or dy does not have the shape of a block.
    """
    wide, dy = widened(x), dy.to(widened(x).dtype)
    w, rstd = _factor(wide, query, weight), _rstd(wide, eps)
    score = _scores(wide, w, rstd)
    alpha = torch.softmax(score, 0)
    dalpha = rows.total(dy * wide)
    slope = alpha * (dalpha - (alpha * dalpha).sum(0)) * rstd
    dx = dquery = dweight = None
    if output_mask[0]:
        dx = alpha * dy + slope * (w - wide * (rstd * score / rows.columns(x)))
        dx = dx.to(x.dtype).contiguous()
    dw = rows.columns_sum(slope * wide)
    if output_mask[1]:
        dquery = (dw if weight is None else dw * weight).to(query.dtype)
    if output_mask[2] and weight is not None:
        dweight = (dw * query).to(weight.dtype)
    return dx, dquery, dweight


def _factor(wide: Tensor, query: Tensor, weight: Tensor | None) -> Tensor:
    """query * weight in the dtype of the arithmetic."""
    query = query.to(wide.dtype)
    return query if weight is None else query * weight.to(wide.dtype)


def _rstd(wide: Tensor, eps: float) -> Tensor:
    return torch.rsqrt(rows.mean(wide * wide) + eps)


def _scores(wide: Tensor, w: Tensor, rstd: Tensor) -> Tensor:
    """(N, ..., 1)."""
    return rows.total(wide * w) * rstd


library.gradient("attn_res")
