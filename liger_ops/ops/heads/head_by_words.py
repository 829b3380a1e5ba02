"""The gradients of a head whose logits are computed again, a chunk of words at a time, for the
definitions of the ops that do so."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..precision import widened
from .chunks import BACKWARD_BYTES, chunks
from .head import Gradients, linear, of_words, products_of


def gradients_by_words(
    dlogits_of: Callable[[Tensor, slice], Tensor],
    rows: Tensor, weight: Tensor, bias: Tensor | None, lora_x: Tensor | None, lora_b: Tensor | None,
    accum_dtype: torch.dtype | None, chunk_bytes: int | None, output_mask: Sequence[bool],
) -> list[Tensor | None]:  # fmt: skip
    """dx, dweight, dbias, dlora_x and dlora_b, with one row per token, or None.

    `dlogits_of(logits, words)` returns the gradient of all tokens' logits of some words, in the
    dtype of the logits.
    """
    products = products_of(rows, weight, lora_x, lora_b)
    # The gradient of a chunk of the bias is complete too, and there is no sum.
    mask = [wanted and i != 2 for i, wanted in enumerate(output_mask)]
    by_words = [product.of_words for product in products]
    gradients = Gradients(by_words, of_words(mask), accum_dtype, in_forward=False)
    dbias = []
    word_bytes = rows.shape[0] * rows.element_size()
    for words in chunks(weight.shape[0], word_bytes, chunk_bytes, default=BACKWARD_BYTES):
        dlogits = dlogits_of(linear(products, bias, words=words), words)
        gradients.add(words, dlogits.t())
        dbias.append(widened(dlogits).sum(0))
    results = of_words(gradients.results())
    if output_mask[2]:
        results[2] = torch.cat(dbias).to(rows.dtype)
    return results
