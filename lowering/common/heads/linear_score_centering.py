"""linear_score_centering on a device: PyTorch's matrix products, a chunk of tokens at a time, and
between them the row functions of the device's cross_entropy. The backward computes what the forward
did not as linear_log_prob's."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .... import library
from ....ops.heads.gradients import WEIGHT
from ....ops.heads.head import (
    HEAD,
    Head,
    divisor,
    finished_in_forward,
    first_given,
    shaped,
    still_missing,
)
from ....ops.heads.linear_score_centering import Tokens, as_log_prob, gradient_of_words
from ....ops.losses.score_centering import losses_of
from ..losses.cross_entropy import TokenTensors
from ..losses.log_prob import as_loss, words_of
from ..losses.words import Places, any_word, log_probs_of, word_logits
from . import linear_log_prob
from .chunked_head import Device, Outputs, chunked_tokens

_LOG_PROB = library.OPS["linear_log_prob_forward"]


class Columns(NamedTuple):
    """The columns in which a token's logits have gradients, each once.

    A sampled word that is listed too has the column of the listed one, which is `same`; `alone` has
    no such column. All are (M, K + 1) or (M, K).
    """

    places: Places
    same: Tensor
    alone: Tensor

    @staticmethod
    def of_words(words: Tensor, V: int) -> Columns:
        sampled, listed = words[:, :1], words[:, 1:]
        same = (listed == sampled) & (sampled >= 0)
        alone = ~same.any(-1, keepdim=True)
        columns = torch.cat([torch.where(alone, sampled, -1), listed], -1)
        return Columns(Places.of_columns(columns, V), same, alone)

    def chunk(self, tokens: slice) -> Columns:
        return Columns(self.places.chunk(tokens), self.same[tokens], self.alone[tokens])

    def sums(self, gradients: Tensor) -> Tensor:
        """Return the gradients of the columns from those of the words."""
        sampled, listed = gradients[:, :1], gradients[:, 1:]
        listed = listed + torch.where(self.same, sampled, 0.0)
        return torch.cat([torch.where(self.alone, sampled, 0.0), listed], -1)


def forward(device: Device, call: Any) -> Outputs:
    # Each `del` drops references: the output of a gradient is not in memory beside its wider sum.
    allocated = library.allocate("linear_score_centering_forward", call)
    outputs, computed = allocated[: -len(HEAD)], allocated[-len(HEAD) :]
    del allocated
    loss, log_prob, lse, coefficients, total_weight, error = outputs
    tokens = Tokens.of_call(call)
    whole, bounds = Head.of_call(call), (call.accum_dtype, call.chunk_bytes)
    targets = as_log_prob(_LOG_PROB, call, x=whole.x, target=tokens.targets)
    options, words = as_loss(targets), words_of(targets)
    assert words is not None
    columns = Columns.of_words(words, call.weight.shape[0])
    of_words = [x.view(words.shape) for x in (log_prob, coefficients)]
    # The kernel also computes a log-probability, of word 0, which is not used.
    rows = TokenTensors(
        None, any_word(words), None, lse=lse.view(-1), lse_error=error.view(-1),
        log_prob=torch.empty_like(lse.view(-1)),
    )  # fmt: skip
    head = chunked_tokens(whole, computed[WEIGHT], device.alignment, *bounds)
    gradients = head.gradients(computed)
    del computed
    for chunk, chunk_head, logits in head.logits():
        part = rows.chunk(chunk)
        device.cross_entropy.loss_and_gradient(options, logits, part, False)
        listed = word_logits(options, logits, words[chunk])
        log_p = log_probs_of(listed, words[chunk], part)
        gradient = tokens.sampled.chunk(chunk).coefficients(log_p)
        for memory, values in zip(of_words, (log_p, gradient), strict=True):
            memory[chunk] = values
        if not any(call.gradient_mask):
            continue
        of_chunk = columns.chunk(chunk)
        sums = of_chunk.sums(gradient)
        total = sums.sum(-1, keepdim=True)
        # The gradient of lse, of which the logits of the words have one of their own, too. The
        # entropy is read only if it has a gradient.
        upstream = (None, None, -total.squeeze(-1), None, None)
        part = part._replace(log_prob=None, entropy=part.lse)
        device.cross_entropy.gradient(options, upstream, logits, part, logits)
        slope = options.logit_scale
        if options.softcap is not None:
            slope = slope * (1 - (listed / options.softcap).square())
        of_chunk.places.write(logits, (sums - log_p.exp() * total) * slope)
        gradients.add(chunk_head, logits)
    del logits
    losses = losses_of(coefficients, log_prob)
    total_weight.copy_(tokens.kept.sum())
    if call.reduction != "none":
        losses = losses.sum() / divisor(call, total_weight)
    loss.copy_(losses)
    return (*outputs, *shaped(gradients.results(), call))


def backward(device: Device, call: Any) -> Outputs:
    results = library.allocate("linear_score_centering_backward", call)
    finished = finished_in_forward(call, divisor(call, call.total_weight), results, device.scale)
    missing = still_missing(call.output_mask, finished)
    del results
    if not any(missing):
        return tuple(finished)
    of_words = linear_log_prob.backward(device, gradient_of_words(call, missing))
    return first_given(finished, of_words)
