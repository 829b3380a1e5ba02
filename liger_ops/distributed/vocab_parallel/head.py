"""Compute a head with the rank's words a chunk of tokens at a time: its logits, and from their
gradient the gradients of its tensors.

In a graph with a symbolic number of tokens, the number of tokens of a chunk is still a constant, so
that the graph depends only on the number of chunks. A chunk has the same size on all ranks, so that
all have the same number of collectives.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...lowering.common.products import product
from ...ops.heads.gradients import HeadGradients, accumulation_dtype, gradient_dtypes, rounds_once
from ...ops.heads.head import BACKWARD_BYTES, TILE, Head, set_bytes
from .shard import VocabShard, fence, start_sum


def split(head: Head | Tensor, size: int) -> list[Any]:
    """Split a head, or logits, into chunks of `size` tokens."""
    if not isinstance(head, Head):
        return list(head.split(size))
    parts = head.x.split(size)
    loras = [None] * len(parts) if head.lora_x is None else head.lora_x.split(size)
    return [head._replace(x=x, lora_x=y) for x, y in zip(parts, loras, strict=True)]


def gradients_of(
    head: Head, wanted: Sequence[bool], shard: VocabShard, size: int,
    accum_dtype: torch.dtype | None, in_forward: bool,
) -> HeadGradients:  # fmt: skip
    """Return the sums of a head's gradients over chunks of `size` tokens.

    If the gradients of x and lora_x are summed over the ranks, the collective runs while the matrix
    products that follow are computed.
    """
    dtypes = gradient_dtypes(head.weight, wanted, accum_dtype, in_forward)
    sum_dtype = accumulation_dtype(head.weight, accum_dtype)
    if rounds_once(head.weight, accum_dtype) and head.x.shape[0] <= size:
        sum_dtype = head.weight.dtype
    share = partial(start_sum, group=shard.group) if shard.sums_x else None
    return HeadGradients(dtypes, sum_dtype, multiply=_multiply, share=share)


def _multiply(a: Tensor, b: Tensor, dtype: torch.dtype, out: Tensor | None, add: bool) -> Tensor:
    if not torch.compiler.is_compiling():
        return product(a, b, dtype, out, add)
    part = _traced(a, b, dtype)
    return fence(out) + part if add and out is not None else part


def _traced(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute a @ b as `product` does, without writing in place. In the forward of an autograd
    function, Dynamo cannot save a tensor that aliases another: a tensor that was written to is such
    an alias, and so is the result of `to` with the same dtype."""
    if a.dtype is dtype:
        return torch.mm(a, b)
    if a.is_cuda:
        return torch.ops.aten.mm.dtype(a, b, dtype)
    if a.dtype is torch.bfloat16:
        return torch.mm(a, b).to(dtype)
    return torch.mm(a.to(dtype), b.to(dtype))


def chunk_size(row_bytes: int, chunk_bytes: int | None) -> int:
    """Return the number of tokens of a chunk of at most `chunk_bytes`, and at least 1."""
    most = set_bytes(chunk_bytes) or BACKWARD_BYTES
    fitting = max(1, most // max(1, row_bytes))
    return fitting if fitting < TILE else fitting // TILE * TILE


def loss_chunk_size(
    head: Head, shard: VocabShard, wanted: Sequence[bool], chunk_bytes: int | None,
    accum_dtype: torch.dtype | None,
) -> int:  # fmt: skip
    """Return the number of tokens of a chunk of a loss: all tokens, if the user set no size and a
    single chunk takes no more memory than several.

    A single chunk takes its logits and their gradient, and then the gradient of weight in the
    memory of the logits. Several take three chunks of logits, the gradient of weight in a wider
    dtype, and the gradient of x.
    """
    x, weight = head.x, head.weight
    item_bytes = x.element_size()
    row_bytes = shard.most * item_bytes
    size = chunk_size(row_bytes, chunk_bytes)
    if set_bytes(chunk_bytes):
        return size
    sum_bytes = dx_bytes = 0
    if wanted[1] and rounds_once(weight, accum_dtype):
        sum_bytes = shard.most * x.shape[1] * accumulation_dtype(weight, accum_dtype).itemsize
    if wanted[0]:
        dx_bytes = x.shape[1] * item_bytes
    single = (3 * BACKWARD_BYTES + sum_bytes) // max(1, 2 * row_bytes - dx_bytes)
    return single if x.shape[0] <= single else size
