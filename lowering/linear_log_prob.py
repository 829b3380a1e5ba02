"""linear_log_prob on a device: PyTorch's matrix products, and between them the row functions of the
device's cross_entropy. The forward takes chunks of tokens, the backward chunks of words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .. import library
from ..ops.chunks import BACKWARD_BYTES, chunks
from ..ops.head import Product, accumulation_dtype, of_words, products_of
from .cross_entropy import Tokens
from .linear_cross_entropy import Gradients, head_of, linear
from .log_prob import as_loss, results
from .sizes import cdiv
from .tensors import flat

Upstream = tuple[Tensor | None, ...]
Outputs = tuple[Tensor | None, ...]


def register(device: str, kernels: Any, alignment: int) -> None:
    """Register the ops with the row functions of the module `kernels`. Each row of logits starts at
    a multiple of `alignment` elements; with 1, the rows are adjacent."""

    module = kernels.__name__

    # allocates=True, so that the output of a gradient is not in memory beside its wider sum.
    @library.kernel("linear_log_prob_forward", device, allocates=True, module=module)
    def linear_log_prob_forward(call):
        return _forward(call, kernels, alignment)

    @library.kernel("linear_log_prob_backward", device, allocates=True, module=module)
    def linear_log_prob_backward(call):
        # Without the gradients of weight and bias, those of a chunk of tokens are complete, but for
        # lora_b's, whose sum is smaller than that of x's.
        backward = _by_words if any(call.output_mask[1:3]) else _by_tokens
        return backward(call, kernels, alignment)


def _forward(call: Any, kernels: Any, alignment: int) -> tuple[Tensor | None, ...]:
    outputs = library.allocate("linear_log_prob_forward", call)
    loss, tokens = as_loss(call), results(call, *outputs)
    head = head_of(call, None, alignment)
    for chunk, logits in head.logits():
        kernels.loss_and_gradient(loss, logits, tokens.chunk(chunk), False)
    total = tokens.lse.new_empty(())
    kernels.reduce(loss, call.weight.shape[0], tokens, None, None, total)
    return outputs


def _by_tokens(call: Any, kernels: Any, alignment: int) -> Outputs:
    """dx, dlora_x and dlora_b, a chunk of tokens at a time."""
    outputs = library.allocate("linear_log_prob_backward", call)
    upstream, tokens, lse = _of_tokens(call)
    loss, head = as_loss(call), head_of(call, None, alignment)
    gradients = Gradients(head.products, outputs, head.sum_dtype)
    del outputs
    for chunk, logits in head.logits():
        grads = [None if grad is None else grad[chunk] for grad in upstream]
        kernels.gradient(loss, grads, logits, tokens.chunk(chunk), lse[chunk], logits)
        gradients.add(chunk, logits)
    return tuple(gradients.rounded())


def _by_words(call: Any, kernels: Any, alignment: int) -> Outputs:
    """Every gradient, a chunk of words at a time."""
    outputs = of_words(library.allocate("linear_log_prob_backward", call))
    dbias, outputs[2] = outputs[2], None
    upstream, tokens, lse = _of_tokens(call)
    rows, weight = call.x.reshape(call.target.numel(), call.x.shape[-1]), call.weight
    word_bytes = rows.shape[0] * rows.itemsize
    slices = list(chunks(weight.shape[0], word_bytes, call.chunk_bytes, default=BACKWARD_BYTES))
    sum_dtype = accumulation_dtype(rows, call.accum_dtype)
    if len(slices) == 1 and call.accum_dtype is None and rows.dtype is torch.bfloat16:
        # One product has the whole gradient of x: there is no sum.
        sum_dtype = rows.dtype
    products = products_of(rows, weight, call.lora_x, call.lora_b)
    gradients = Gradients([product.of_words for product in products], outputs, sum_dtype)
    del outputs
    for words, logits in _logits(products, call.bias, slices, alignment):
        # A target that is not among the words is out of range, and has no column.
        words_tokens = tokens._replace(target=tokens.target - words.start)
        loss = as_loss(call, first=words.start)
        kernels.gradient(loss, upstream, logits, words_tokens, lse, logits)
        gradients.add(words, logits.t())
        if dbias is not None:
            dbias[words] = logits.sum(0, dtype=torch.float32)
    del logits
    results = of_words(gradients.rounded())
    results[2] = dbias
    return tuple(results)


def _logits(
    products: list[Product], bias: Tensor | None, slices: list[slice], alignment: int
) -> Iterator[tuple[slice, Tensor]]:
    """Yield each chunk of words and the logits of all rows, whose memory the next chunk reuses."""
    rows = products[0].rows
    M = rows.shape[0]
    memory = None
    for words in slices:
        count = words.stop - words.start
        stride = cdiv(count, alignment) * alignment
        if memory is None:
            memory = rows.new_empty(M * stride)
        logits = memory[: M * stride].view(M, stride)[:, :count]
        linear(logits, products, bias, words=words)
        yield words, logits


def _of_tokens(call: Any) -> tuple[Upstream, Tokens, Tensor]:
    """The upstream gradients of cross_entropy's row function, the tokens, and lse.

    d(log_prob) is that of the target's logit, less that of lse: the row function takes the two by
    themselves where the target is not among the columns. An ignored token has neither.
    """
    ignored = call.target == call.ignore_index
    dlog_prob, dlse = (
        None if grad is None else grad.to(call.lse.dtype).masked_fill(ignored, 0.0)
        for grad in (call.dlog_prob, call.dlse)
    )
    soft = dlse
    if dlog_prob is not None:
        soft = -dlog_prob if dlse is None else dlse - dlog_prob
    upstream = (None, None, flat(soft), flat(dlog_prob), flat(call.dentropy))
    tokens = Tokens(None, flat(call.target), None, entropy=flat(call.entropy))
    return upstream, tokens, flat(call.lse)
