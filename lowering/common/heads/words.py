"""A head on a device, a chunk of words at a time: of each, the logits of all tokens, and complete
rows of the gradients of weight, bias and lora_b."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ....ops.heads.chunks import BACKWARD_BYTES, chunks
from ....ops.heads.head import Product, accumulation_dtype, of_words
from ..sizes import cdiv
from .linear_cross_entropy import Gradients, linear


@dataclass(frozen=True)
class ChunkedWords:
    """The products of a head and its bias, and the chunks of words in which its logits are
    computed. Each row of logits starts at a multiple of `alignment` elements."""

    products: list[Product]
    bias: Tensor | None
    alignment: int
    slices: list[slice]

    def logits(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield each chunk of words and the logits of all tokens, whose memory the next chunk
        reuses."""
        rows = self.products[0].rows
        M = rows.shape[0]
        memory = None
        for words in self.slices:
            count = words.stop - words.start
            stride = cdiv(count, self.alignment) * self.alignment
            if memory is None:
                memory = rows.new_empty(M * stride)
            logits = memory[: M * stride].view(M, stride)[:, :count]
            if count:
                linear(logits, self.products, self.bias, words=words)
            yield words, logits


def chunked_words(
    products: list[Product], bias: Tensor | None, alignment: int,
    chunk_bytes: int | None, other_bytes: int = 0,
) -> ChunkedWords:  # fmt: skip
    """A head in chunks of words; a chunk has `other_bytes` more a token and word."""
    rows, weight = products[0]
    word_bytes = rows.shape[0] * (rows.itemsize + other_bytes)
    slices = chunks(weight.shape[0], word_bytes, chunk_bytes, default=BACKWARD_BYTES)
    return ChunkedWords(products, bias, alignment, list(slices))


class GradientsByWords:
    """The gradients of a head's tensors, written to the op's outputs, which are given in the order
    of the masks. Those of x and lora_x are sums over the chunks."""

    def __init__(
        self, head: ChunkedWords, outputs: Sequence[Tensor | None],
        accum_dtype: torch.dtype | None,
    ) -> None:  # fmt: skip
        rows = head.products[0].rows
        sum_dtype = accumulation_dtype(rows, accum_dtype)
        if len(head.slices) == 1 and accum_dtype is None and rows.dtype is torch.bfloat16:
            # One product has the whole gradient of x: there is no sum.
            sum_dtype = rows.dtype
        by_words = of_words(outputs)
        self.dbias, by_words[2] = by_words[2], None
        products = [product.of_words for product in head.products]
        self.others = Gradients(products, by_words, sum_dtype)

    def add(self, words: slice, dlogits: Tensor) -> None:
        self.others.add(words, dlogits.t())
        if self.dbias is not None:
            self.dbias[words] = dlogits.sum(0, dtype=torch.float32)

    def rounded(self) -> list[Tensor | None]:
        results = of_words(self.others.rounded())
        results[2] = self.dbias
        return results
