"""The backward of a head whose logits are computed again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from .... import library
from ....ops.heads.head import products_of
from .linear_cross_entropy import Gradients, chunked_linear
from .words import GradientsByWords, chunked_words

Outputs = tuple[Tensor | None, ...]
# dlogits(logits, tokens, words) writes the gradient of some tokens' logits of some words over them.
Dlogits = Callable[[Tensor, slice, slice], None]


def backward(name: str, call: Any, M: int, alignment: int, dlogits: Dlogits) -> Outputs:
    """dx, dweight, dbias, dlora_x and dlora_b of a call of op `name` with M tokens."""
    # Without the gradients of weight and bias, those of a chunk of tokens are complete, but for
    # lora_b's, whose sum is smaller than that of x's.
    by_words = any(call.output_mask[1:3])
    outputs = library.allocate(name, call)
    rows = call.x.reshape(M, call.x.shape[-1])
    products = products_of(rows, call.weight, call.lora_x, call.lora_b)
    if by_words:
        words_head = chunked_words(products, call.bias, alignment, call.chunk_bytes)
        words_gradients = GradientsByWords(words_head, outputs, call.accum_dtype)
        del outputs
        for words, logits in words_head.logits():
            dlogits(logits, slice(0, M), words)
            words_gradients.add(words, logits)
        del logits
        return tuple(words_gradients.rounded())
    bounds = (call.accum_dtype, call.chunk_bytes)
    head = chunked_linear(products, call.bias, None, alignment, *bounds)
    gradients = Gradients(head.products, outputs, head.sum_dtype)
    del outputs
    for tokens, logits in head.logits():
        dlogits(logits, tokens, slice(0, call.weight.shape[0]))
        gradients.add(tokens, logits)
    del logits
    return tuple(gradients.rounded())
