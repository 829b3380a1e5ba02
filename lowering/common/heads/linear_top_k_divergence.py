"""linear_top_k_divergence on a device: PyTorch's matrix products, and between them the row
functions of the device's cross_entropy. The forward takes chunks of tokens, the backward chunks of
words.

PyTorch's gather and scatter read and write the logits of the listed words, which are few. In the
forward the listed logits are then -inf, so that cross_entropy's kernel computes lse of the rest of
the vocabulary as it would that of a whole one.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .... import library
from ....ops.heads.head import Head
from ....ops.losses.cross_entropy import rounded_lse
from ....ops.losses.log_prob import tempered
from ..losses.cross_entropy import IGNORED, TokenTensors, loss_of_tokens
from ..losses.words import any_word, place, word_logits
from ..tensors import flat
from .chunked_head import Device, Outputs, chunked_tokens, recomputed

INF = float("inf")


def forward(device: Device, call: Any) -> tuple[Tensor, Tensor, Tensor]:
    logits, rest, error = library.allocate("linear_top_k_divergence_forward", call)
    ids, flat_rest, loss = _ids(call), rest.view(-1), _loss(call)
    flat_logits = logits.view(ids.shape)
    # The kernel also computes a log-probability, of word 0, which is not used.
    tokens = TokenTensors(
        None, any_word(ids), None, lse=flat_rest, lse_error=error.view(-1),
        log_prob=torch.empty_like(flat_rest),
    )  # fmt: skip
    head, bounds = Head.of_call(call), (call.accum_dtype, call.chunk_bytes)
    for chunk, _, chunk_logits in chunked_tokens(head, None, device.alignment, *bounds).logits():
        words = ids[chunk]
        listed = word_logits(loss, chunk_logits, words)
        flat_logits[chunk] = torch.where(words < 0, -INF, listed)
        place(chunk_logits, words, torch.full_like(listed, -INF))
        device.cross_entropy.loss_and_gradient(loss, chunk_logits, tokens.chunk(chunk), False)
    if loss.softcap is not None:
        # The kernel's softcap maps the -inf of each listed word to -softcap: subtract their
        # exponentials from lse again. Without other words nothing is left, and lse is -inf.
        count = (ids >= 0).sum(-1)
        share = (count * torch.exp(-loss.softcap - flat_rest)).clamp(max=1.0)
        correction = torch.log1p(-share) + error.view(-1)
        corrected, new_error = rounded_lse(flat_rest, correction)
        flat_rest.copy_(torch.where(count == call.weight.shape[0], -INF, corrected))
        error.view(-1).copy_(new_error)
    return logits, rest, error


def backward(device: Device, call: Any) -> Outputs:
    ids, rest, loss = _ids(call), flat(call.rest), _loss(call)
    assert rest is not None
    target = any_word(ids)
    # Without other words lse is -inf: exp(x - inf) is 0, and with it the gradient.
    lse, error = torch.where(rest == -INF, INF, rest), flat(call.rest_error)
    all_tokens = TokenTensors(None, target, None, lse=lse, lse_error=error)
    drest = None
    if call.drest is not None:
        drest = flat(call.drest.to(rest.dtype)).masked_fill(target == IGNORED, 0.0)
    values = torch.zeros(ids.shape, dtype=rest.dtype, device=rest.device)
    if call.dlogits is not None:
        values = call.dlogits.reshape(ids.shape) * loss.logit_scale
        if loss.softcap is not None:
            values = values * (1 - (call.logits.reshape(ids.shape) / loss.softcap).square())

    def dlogits(logits: Tensor, tokens: slice, words: slice) -> None:
        if drest is None:
            logits.zero_()
        else:
            upstream = (None, None, drest[tokens], None, None)
            device.cross_entropy.gradient(loss, upstream, logits, all_tokens.chunk(tokens), logits)
        place(logits, ids[tokens] - words.start, values[tokens])

    return recomputed("linear_top_k_divergence_backward", call, device.alignment, dlogits)


def _ids(call: Any) -> Tensor:
    """Return the listed words of each token, (M, K); -1 for none."""
    shape = call.teacher_ids.shape
    # Within a chunk words are counted from its first: an id far below 0 would overflow, and could
    # become one of the chunk's words.
    return call.teacher_ids.reshape(math.prod(shape[:-1]), shape[-1]).long().clamp(min=-1)


def _loss(call: Any) -> Any:
    """Return the options as those of cross_entropy: the temperature is part of softcap and
    logit_scale."""
    return loss_of_tokens(IGNORED, *tempered(call.temperature, call.softcap, call.logit_scale))
