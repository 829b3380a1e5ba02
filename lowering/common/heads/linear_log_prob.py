"""linear_log_prob on a device: PyTorch's matrix products, and between them the row functions of the
device's cross_entropy. The forward takes chunks of tokens, the backward chunks of words."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .... import library
from ....ops.heads.head import Head
from ..losses.log_prob import as_loss, given_tokens, results, words_of
from ..losses.words import WordGradients, place, word_log_probs
from ..tensors import flat
from .chunked_head import Device, Outputs, chunked_tokens, recomputed

Upstream = tuple[Tensor | None, ...]


def forward(device: Device, call: Any) -> tuple[Tensor | None, ...]:
    outputs = library.allocate("linear_log_prob_forward", call)
    loss, words = as_loss(call), words_of(call)
    tokens = results(call, words, *outputs)
    head, bounds = Head.of_call(call), (call.accum_dtype, call.chunk_bytes)
    for chunk, _, logits in chunked_tokens(head, None, device.alignment, *bounds).logits():
        part = tokens.chunk(chunk)
        device.cross_entropy.loss_and_gradient(loss, logits, part, False)
        if words is not None:
            log_prob = word_log_probs(loss, logits, words[chunk], part)
            outputs[0].view(words.shape)[chunk] = log_prob
    # Only for its check of the targets: nothing is reduced.
    total = tokens.lse.new_empty(())
    device.cross_entropy.reduce(loss, call.weight.shape[0], tokens, None, None, total)
    return outputs


def backward(device: Device, call: Any) -> Outputs:
    listed, of_words = words_of(call), None
    all_tokens = given_tokens(call, listed)
    if listed is not None:
        of_words = WordGradients.of_call(call, listed, all_tokens)
    upstream = () if of_words is not None else _upstream(call)

    def dlogits(logits: Tensor, tokens: slice, words: slice) -> None:
        grads = [None if grad is None else grad[tokens] for grad in upstream]
        placed = None
        if of_words is not None:
            grads = of_words.of_tokens(tokens)
            placed = of_words.of_logits(logits, tokens, words.start)
        part = all_tokens.chunk(tokens)
        # A target that is not among the words is out of range, and has no column.
        part = part._replace(target=part.target - words.start)
        loss = as_loss(call, first=words.start)
        device.cross_entropy.gradient(loss, grads, logits, part, logits)
        if placed is not None:
            place(logits, *placed)

    return recomputed("linear_log_prob_backward", call, device.alignment, dlogits)


def _upstream(call: Any) -> Upstream:
    """Return the upstream gradients for cross_entropy's row function, of one target a token.

    log_prob is the target's logit less lse, so that dlog_prob is passed as the gradients of these
    two: the row function would not count a loss whose target is not among the chunk's columns. An
    ignored token has neither.
    """
    ignored = call.target == call.ignore_index
    dlog_prob, dlse = (
        None if grad is None else grad.to(call.lse.dtype).masked_fill(ignored, 0.0)
        for grad in (call.dlog_prob, call.dlse)
    )
    total_dlse = dlse
    if dlog_prob is not None:
        total_dlse = -dlog_prob if dlse is None else dlse - dlog_prob
    return None, None, flat(total_dlse), flat(dlog_prob), flat(call.dentropy)
