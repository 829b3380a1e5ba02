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
from ..losses.words import WordGradients, any_word, place, word_log_probs
from . import linear_log_prob
from .chunked_head import ALL, Device, Outputs, chunked_tokens

_LOG_PROB = library.OPS["linear_log_prob_forward"]


class Columns(NamedTuple):
    """The columns in which a token's logits have gradients, each once: the words, (M, K + 1), with
    -1 for a sampled word that is listed too. `same` says of the listed words which one that is."""

    words: Tensor
    same: Tensor

    @staticmethod
    def of_words(words: Tensor) -> Columns:
        sampled, listed = words[:, :1], words[:, 1:]
        same = (listed == sampled) & (sampled >= 0)
        sampled = sampled.masked_fill(same.any(-1, keepdim=True), -1)
        return Columns(torch.cat([sampled, listed], -1), same)

    def sums(self, gradients: Tensor, tokens: slice) -> Tensor:
        """Return the gradients of the columns of some tokens from those of their words."""
        sampled, listed = gradients[:, :1], gradients[:, 1:]
        listed = listed + torch.where(self.same[tokens], sampled, 0.0)
        return torch.cat([torch.where(self.words[tokens, :1] < 0, 0.0, sampled), listed], -1)


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
    columns = Columns.of_words(words)
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
        log_p = word_log_probs(options, logits, words[chunk], part)
        gradient = tokens.sampled.chunk(chunk).coefficients(log_p)
        for memory, values in zip(of_words, (log_p, gradient), strict=True):
            memory[chunk] = values
        if not any(call.gradient_mask):
            continue
        # The entropy is read only if it has a gradient.
        part = part._replace(log_prob=None, entropy=part.lse)
        sums = columns.sums(gradient, chunk)
        listed = WordGradients(call, columns.words[chunk], sums, None, None, part)
        placed = listed.of_logits(logits, ALL)
        upstream = listed.of_tokens(ALL)
        device.cross_entropy.gradient(options, upstream, logits, part, logits)
        place(logits, *placed)
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
