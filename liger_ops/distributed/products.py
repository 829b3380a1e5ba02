"""The products of a chunk's gradient with weight and x, and their sum over the chunks."""

from __future__ import annotations

import torch
from torch import Tensor

from ..lowering.linear_cross_entropy import product


def added(total: Tensor | None, a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """total + a @ b, or a @ b, in dtype, which may be wider than that of a and b. `total` is used
    up."""
    if torch.compiler.is_compiling():
        part = _traced(a, b, dtype)
        return part if total is None else total + part
    add = total is not None
    if total is None:
        total = a.new_empty((a.shape[0], b.shape[1]), dtype=dtype)
    product(total, a, b, add)
    return total


def _traced(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a @ b as `product` computes it, without a write in place: Dynamo cannot save a tensor of an
    autograd function's forward that aliases another, as one that was written to does, or the
    result of `to` the same dtype."""
    if a.dtype is dtype:
        return torch.mm(a, b)
    if a.is_cuda:
        return torch.ops.aten.mm.dtype(a, b, dtype)
    if a.dtype is torch.bfloat16:
        return torch.mm(a, b).to(dtype)
    return torch.mm(a.to(dtype), b.to(dtype))


def rounded(total: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """total in dtype, for autograd to save: see `_traced`."""
    return total if total is None or total.dtype is dtype else total.to(dtype)
