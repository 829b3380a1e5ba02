"""linear_log_prob on a device: PyTorch's matrix products, and between them the row functions of the
device's cross_entropy. The forward takes chunks of tokens, the backward chunks of words."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .. import library
from ..ops.head import products_of
from .cross_entropy import Tokens
from .linear_cross_entropy import Gradients, head_of
from .log_prob import as_loss, results
from .tensors import flat
from .words import GradientsByWords, chunked_words

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
    outputs = library.allocate("linear_log_prob_backward", call)
    upstream, tokens, lse = _of_tokens(call)
    rows = call.x.reshape(call.target.numel(), call.x.shape[-1])
    products = products_of(rows, call.weight, call.lora_x, call.lora_b)
    head = chunked_words(products, call.bias, alignment, call.chunk_bytes)
    gradients = GradientsByWords(head, outputs, call.accum_dtype)
    del outputs
    for words, logits in head.logits():
        # A target that is not among the words is out of range, and has no column.
        words_tokens = tokens._replace(target=tokens.target - words.start)
        loss = as_loss(call, first=words.start)
        kernels.gradient(loss, upstream, logits, words_tokens, lse, logits)
        gradients.add(words, logits)
    del logits
    return tuple(gradients.rounded())


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
