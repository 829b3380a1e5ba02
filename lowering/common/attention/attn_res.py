"""Host code of attn_res, for both devices. Tensors with one number for each token of each block are
left to PyTorch: the softmax for rows that are too wide for one pass, and the factors of the
gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def blocks_of(x: Tensor) -> Tensor:
    """Return x as (blocks, M, N), contiguous."""
    return x.reshape(x.shape[0], -1, x.shape[-1]).contiguous()


def combined(call: Any) -> Tensor:
    """Compute query * weight, (N,), in float32."""
    query = call.query.float()
    return (query if call.weight is None else query * call.weight.float()).contiguous()


def per_row(x: Tensor, count: int) -> Tensor:
    """Allocate `count` float32 numbers for each row of each block: (count, blocks, M)."""
    return x.new_empty((count, *x.shape[:2]), dtype=torch.float32)


def factors(score: Tensor, rstd: Tensor, dalpha: Tensor, N: int) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the factors of dy, w and x in dx; each is (blocks, M)."""
    alpha = torch.softmax(score, 0)
    of_w = (dalpha - (alpha * dalpha).sum(0)).mul_(alpha).mul_(rstd)
    return alpha, of_w, (of_w * rstd).mul_(score).div_(-N)


def finish(call: Any, dw: Tensor | None, dquery: Tensor | None, dweight: Tensor | None) -> None:
    """Fill the gradients of query and weight from dw, the gradient of their product."""
    if dquery is not None and dw is not None:
        dquery.copy_(dw if call.weight is None else dw * call.weight)
    if dweight is not None and dw is not None:
        dweight.copy_(dw * call.query)
