"""The cross-entropies of a device's words: the ops' results and gradients, with the numbers of all
words."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...ops.heads.head import both, divisor, finished_in_forward, shaped, still_missing
from ...ops.losses.cross_entropy import reduced, upstream
from .collectives import gathered
from .lora import head_of_rows
from .loss_of_tokens import Terms, Tokens, gradients_of_sum, losses
from .products import Head
from .summed_loss import ChunkedLoss
from .token_statistics import (
    Layer,
    Options,
    Statistics,
    Upstream,
    gradients,
    local_statistics,
    of_all_ranks,
    of_logits,
    upstream_here,
)
from .words import Words


def cross_entropy(call: Any, words: Words) -> tuple[Tensor | None, ...]:
    """`cross_entropy_forward` of the logits of a device's words."""
    tokens = _tokens(call, words, call.logits, call.weight)
    head, options = of_logits(call.logits), _options(call)
    return _results(call, words, tokens, _statistics(head, tokens, words, options))


def cross_entropy_backward(call: Any, words: Words) -> Tensor | None:
    tokens = _tokens(call, words, call.logits, call.weight)
    return gradients(
        of_logits(call.logits), tokens.target, tokens.class_weight,
        (call.lse, call.lse_error), _upstream(call, words, tokens), words, _options(call),
        [True] + [False] * 4,
    )[0]  # fmt: skip


def linear_cross_entropy(call: Any, words: Words) -> tuple[Tensor | None, ...]:
    """`linear_cross_entropy_forward` of a device's words."""
    tokens = _tokens(call, words, call.x, call.class_weight)
    options = _options(call)._replace(accum_dtype=call.accum_dtype, chunk_bytes=call.chunk_bytes)
    head = _head(call)
    if not any(call.gradient_mask):
        statistics = _statistics(head, tokens, words, options)
        return *_results(call, words, tokens, statistics), *(None for _ in head)
    terms = Terms(call.label_smoothing, call.lse_square_scale, words.V)
    chunked = ChunkedLoss(
        head_of_rows(*head), tokens.flat(), terms, words, options, list(call.gradient_mask), False
    )
    statistics = chunked.statistics().reshape(call.target.shape)
    computed = shaped(chunked.gradients.results(), head)
    return *_results(call, words, tokens, statistics), *computed


def linear_cross_entropy_backward(call: Any, words: Words) -> tuple[Tensor | None, ...]:
    computed = (call.dx, call.dweight, call.dbias, call.dlora_x, call.dlora_b)
    items = divisor(call.reduction, call.total_weight, call.num_items_in_batch)
    finished = finished_in_forward(
        call.dloss, computed, call.output_mask, call.target, call.ignore_index, items, call.x.dtype
    )
    missing = still_missing(call.output_mask, finished)
    if not any(missing):
        return tuple(finished)
    tokens = _tokens(call, words, call.x, call.class_weight)
    options = _options(call)._replace(accum_dtype=call.accum_dtype, chunk_bytes=call.chunk_bytes)
    made = gradients(
        _head(call), tokens.target, tokens.class_weight, (call.lse, call.lse_error),
        _upstream(call, words, tokens), words, options, missing,
    )  # fmt: skip
    return both(finished, made)


def _head(call: Any) -> Head:
    return Head(call.x, call.weight, call.bias, call.lora_x, call.lora_b)


def _options(call: Any) -> Options:
    return Options(call.label_smoothing != 0, call.softcap, call.logit_scale)


def _tokens(call: Any, words: Words, x: Tensor, class_weight: Tensor | None) -> Tokens:
    dtype = torch.float64 if x.dtype is torch.float64 else torch.float32
    given = (call.ignore_index, class_weight, call.token_weight, dtype)
    return Tokens.of_words(words, call.target, *given)


def _statistics(head: Layer, tokens: Tokens, words: Words, options: Options) -> Statistics:
    local = local_statistics(head, tokens.target, tokens.here, tokens.class_weight, words, options)
    return of_all_ranks(gathered(local, 0, words.group), local, tokens.class_sums)


def _results(
    call: Any, words: Words, tokens: Tokens, statistics: Statistics
) -> tuple[Tensor | None, ...]:
    """The results of `cross_entropy_forward`."""
    lse, error, nll, surprisal = statistics
    terms = Terms(call.label_smoothing, call.lse_square_scale, words.V)
    loss, z_loss = losses(lse, nll, surprisal, tokens, terms)
    target_logit = torch.where(tokens.within, (lse - nll) + error, 0.0)
    total_weight = tokens.counts.sum()
    loss, z_loss = reduced(loss, z_loss, total_weight, call.num_items_in_batch, call.reduction)
    return loss, z_loss, lse, target_logit, total_weight, None, None, error


def _upstream(call: Any, words: Words, tokens: Tokens) -> Upstream:
    """The gradients of the results of the op of the device's words."""
    lse, terms = call.lse, Terms(call.label_smoothing, call.lse_square_scale, words.V)
    per_token = (
        upstream(grad, lse, call.total_weight, call.num_items_in_batch, call.reduction)
        for grad in (call.dloss, call.dz_loss)
    )
    # The divisor of a mean over nothing is 0.
    dloss, dz_loss = (
        None if grad is None else torch.where(tokens.within, grad.to(lse.dtype), 0.0)
        for grad in per_token
    )
    dlse, dtarget_logit, dtotal = gradients_of_sum(
        lse, tokens, terms, torch.zeros_like(lse) if dloss is None else dloss
    )
    if dz_loss is not None and terms.lse_square_scale != 0:
        within = torch.where(tokens.within, lse, 0.0)
        dlse = dlse + 2 * terms.lse_square_scale * dz_loss * tokens.counts * within
    if call.dlse is not None:
        dlse = dlse + call.dlse.to(lse.dtype)
    if call.dtarget_logit is not None:
        dtarget_logit = dtarget_logit + torch.where(tokens.within, call.dtarget_logit, 0.0)
    return upstream_here(dlse, dtarget_logit, dtotal, tokens.here, tokens.class_weight, words)
