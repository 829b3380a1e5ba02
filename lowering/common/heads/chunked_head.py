"""The logits and the gradients of a head on a device, a chunk of tokens or of words at a time:
PyTorch's matrix products, into memory that the chunks share.

A word is a row of the head's weight, a class of the vocabulary. A backward may compute the logits
again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .... import library
from ....ops.heads.gradients import BIAS, WEIGHT, HeadGradients, accumulation_dtype, rounds_once
from ....ops.heads.head import Head, chunks, chunks_of_words, shaped
from ..products import linear, product
from ..tensors import cdiv


class Device(NamedTuple):
    """A device's functions for heads: the modules of its row functions, and its `scale` (see
    `ops/heads/head.py`). Each row of logits starts at a multiple of `alignment` elements: with
    1, the rows are adjacent."""

    cross_entropy: Any
    divergence: Any
    scale: Callable[..., None]
    alignment: int


class ChunkedHead(NamedTuple):
    """A head and its chunks. Each row of logits starts at a multiple of `alignment` elements."""

    head: Head
    alignment: int
    slices: list[slice]
    by_words: bool
    # The dtype of the gradients that are sums over the chunks.
    sum_dtype: torch.dtype

    def logits(self) -> Iterator[tuple[slice, Head, Tensor]]:
        """Yield each chunk, its part of the head, and its logits, whose memory the next chunk
        reuses."""
        memory = None
        for chunk in self.slices:
            head = self.head.of_words(chunk) if self.by_words else self.head.of_tokens(chunk)
            M, V = head.x.shape[0], head.weight.shape[0]
            stride = cdiv(V, self.alignment) * self.alignment
            # The first chunk is the largest.
            if memory is None:
                memory = head.x.new_empty(M * stride)
            logits = memory[: M * stride].view(M, stride)[:, :V]
            # A teacher may have no words in a chunk of the student's words.
            if V:
                _fill(logits, head)
            yield chunk, head, logits

    def gradients(self, outputs: Sequence[Tensor | None]) -> HeadGradients:
        """Return an accumulator of the head's gradients, in the dtypes and the memory of the op's
        outputs."""
        dtypes = [None if output is None else output.dtype for output in outputs]
        return HeadGradients(dtypes, self.sum_dtype, self.by_words, outputs, product)


def chunked_tokens(
    head: Head, dweight: Tensor | None, alignment: int,
    accum_dtype: torch.dtype | None, chunk_bytes: int | None, other_bytes: int = 0,
) -> ChunkedHead:  # fmt: skip
    """Divide a head into chunks of tokens. A chunk takes `other_bytes` for each token beside the
    logits."""
    sum_dtype = accumulation_dtype(head.weight, accum_dtype)
    later_bytes = saved_bytes = 0
    once = rounds_once(head.weight, accum_dtype)
    if dweight is not None and dweight.dtype is not sum_dtype:
        # Several chunks: memory holds the sum and one chunk, and after the last chunk the sum and
        # its rounded copy. One chunk: memory holds the chunk and the rounded product, without a
        # sum.
        later_bytes = dweight.numel() * dweight.itemsize
        if once:
            saved_bytes = dweight.numel() * (sum_dtype.itemsize - dweight.itemsize)
    stride = cdiv(head.weight.shape[0], alignment) * alignment
    row_bytes = stride * head.x.itemsize + other_bytes
    slices = list(chunks(head.x.shape[0], row_bytes, chunk_bytes, later_bytes, saved_bytes))
    if once and len(slices) == 1:
        sum_dtype = head.weight.dtype
    return ChunkedHead(head, alignment, slices, False, sum_dtype)


def chunked_words(
    head: Head, alignment: int, accum_dtype: torch.dtype | None, chunk_bytes: int | None,
    other_bytes: int = 0,
) -> ChunkedHead:  # fmt: skip
    """Divide a head into chunks of words. A chunk takes `other_bytes` for each token and word
    beside the logits."""
    word_bytes = head.x.shape[0] * (head.x.itemsize + other_bytes)
    slices = list(chunks_of_words(head.weight.shape[0], word_bytes, chunk_bytes))
    sum_dtype = accumulation_dtype(head.x, accum_dtype)
    if len(slices) == 1 and rounds_once(head.x, accum_dtype):
        # One product has the whole gradient of x: there is no sum.
        sum_dtype = head.x.dtype
    return ChunkedHead(head, alignment, slices, True, sum_dtype)


def _fill(logits: Tensor, head: Head) -> None:
    """Fill logits with those of a chunk's head. The product of a LoRA is added in the memory of the
    logits."""
    linear(head.x, head.weight, head.bias, out=logits)
    if head.lora_x is not None and head.lora_b is not None:
        logits.addmm_(head.lora_x, head.lora_b.t())


Outputs = tuple[Tensor | None, ...]
ALL = slice(0, None)
# dlogits(logits, tokens, words) writes the gradient of some tokens' logits of some words over them.
Dlogits = Callable[[Tensor, slice, slice], None]


def recomputed(name: str, call: Any, alignment: int, dlogits: Dlogits) -> Outputs:
    """Compute dx, dweight, dbias, dlora_x and dlora_b of a call of op `name`."""
    outputs = library.allocate(name, call)
    head, bounds = Head.of_call(call), (call.accum_dtype, call.chunk_bytes)
    # The gradients of weight and bias are complete in a chunk of words, and that of x is a sum over
    # the chunks; in chunks of tokens it is the other way round. lora_b's gradient is a sum over
    # chunks of tokens, which is smaller than that of x's over chunks of words.
    by_words = call.output_mask[WEIGHT] or call.output_mask[BIAS]
    if by_words:
        chunked = chunked_words(head, alignment, *bounds)
    else:
        chunked = chunked_tokens(head, None, alignment, *bounds)
    gradients = chunked.gradients(outputs)
    del outputs
    for chunk, chunk_head, logits in chunked.logits():
        dlogits(logits, *((ALL, chunk) if by_words else (chunk, ALL)))
        gradients.add(chunk_head, logits)
    del logits
    return shaped(gradients.results(), call)
