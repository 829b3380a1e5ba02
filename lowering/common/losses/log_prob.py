"""log_prob on a device, computed by the row functions of the device's cross_entropy.

They take one target a token. Of K targets they compute what the tokens share, and `words` the
rest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .... import library
from ....ops.heads.head import flat_tokens
from ....ops.losses.log_prob import RESULTS, has_words, tempered
from ..tensors import flat
from .cross_entropy import IGNORED, TokenTensors, loss_of_tokens, per_token
from .words import WordGradients, any_word, place, word_log_probs

_NAMES = RESULTS.split()
ALL = slice(0, None)


def as_loss(call: Any, first: int = 0) -> Any:
    """Return the options of a call of log_prob as a call of cross_entropy without tensors. The
    temperature is part of softcap and logit_scale, and targets are counted from class `first`."""
    options = tempered(call.temperature, call.softcap, call.logit_scale)
    ignore_index = IGNORED if has_words(call) else call.ignore_index
    return loss_of_tokens(ignore_index - first, *options)


def words_of(call: Any) -> Tensor | None:
    """Return the K targets of each token of a call, (M, K) and int64, or None for one target a
    token. An ignored one is -1, and one that is out of range is V or more."""
    if not has_words(call):
        return None
    x, target = call.x if hasattr(call, "x") else call.logits, call.target
    words = flat_tokens(target, x).long()
    # A target below 0 that is not ignored becomes one that no vocabulary has.
    words = torch.where(words < 0, torch.iinfo(torch.int32).max, words)
    return words.masked_fill(flat_tokens(target == call.ignore_index, x), -1)


def results(call: Any, words: Tensor | None, *outputs: Tensor | None) -> TokenTensors:
    """Return the targets of a call, and the results to fill. For K targets, log_prob is memory for
    that of an arbitrary class."""
    named = dict(zip(_NAMES, map(flat, outputs), strict=True))
    if words is None:
        return TokenTensors(None, flat(call.target), None, **named)
    named["log_prob"] = torch.empty_like(named["lse"])
    return TokenTensors(None, any_word(words), None, **named)


def given_tokens(call: Any, words: Tensor | None) -> TokenTensors:
    """Return the tensors of a backward call's tokens."""
    statistics = {name: flat(getattr(call, name)) for name in ("lse", "entropy", "lse_error")}
    target = flat(call.target) if words is None else any_word(words)
    return TokenTensors(None, target, None, **statistics)


def register(device: str, kernels: Any, rows: Callable[[Tensor], Tensor]) -> None:
    """Register the ops with the row functions of the module `kernels`; rows(logits) returns the
    logits as (M, V)."""

    module = kernels.__name__

    @library.kernel("log_prob_forward", device, module=module)
    def log_prob_forward(call, *outputs_and_plan):
        *outputs, plan = outputs_and_plan
        loss, words, logits = as_loss(call), words_of(call), rows(call.logits)
        tokens = results(call, words, *outputs)
        kernels.loss_and_gradient(loss, logits, tokens, False, plan)
        if words is not None:
            outputs[0].view(words.shape).copy_(word_log_probs(loss, logits, words, tokens))
        # Only for its check of the targets: nothing is reduced.
        total = tokens.lse.new_empty(())
        kernels.reduce(loss, call.logits.shape[-1], tokens, None, None, total)

    @library.kernel("log_prob_backward", device, module=module)
    def log_prob_backward(call, dlogits, plan):
        logits, dlogits = rows(call.logits), dlogits.view(-1, call.logits.shape[-1])
        loss, words = as_loss(call), words_of(call)
        tokens = given_tokens(call, words)
        if words is not None:
            gradients = WordGradients.of_call(call, words, tokens)
            of_words = gradients.of_logits(logits, ALL)
            kernels.gradient(loss, gradients.of_tokens(ALL), logits, tokens, dlogits, plan)
            place(dlogits, *of_words)
            return
        dloss = None if call.dlog_prob is None else -call.dlog_prob
        dlse = call.dlse
        if dlse is not None:
            dlse = dlse.masked_fill(call.target == call.ignore_index, 0.0)
        upstream = per_token(dloss, None, dlse, None, call.dentropy)
        kernels.gradient(loss, upstream, logits, tokens, dlogits, plan)
