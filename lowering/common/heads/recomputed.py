"""The backward of a head whose logits are computed again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from .... import library
from ....ops.heads.gradients import BIAS, WEIGHT
from ....ops.heads.head import Head, shaped
from .chunked_head import chunked_tokens, chunked_words

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
