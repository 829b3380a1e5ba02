"""Log-probabilities and entropies of tokens, over a sharded vocabulary."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from ...ops.heads.linear_log_prob import linear_log_prob_backward, linear_log_prob_forward
from ...ops.losses.log_prob import log_prob_backward, log_prob_forward
from .collectives import gathered, of_each_rank
from .derivatives import once
from .token_statistics import Layer, rank_lses, target_log_prob, with_target
from .words import IGNORED, Words, zeros_of


class Options(NamedTuple):
    temperature: float
    softcap: float | None
    logit_scale: float
    accum_dtype: torch.dtype | None = None
    chunk_bytes: int | None = None

    @property
    def of_op(self) -> tuple[Any, ...]:
        """temperature to ignore_index of the ops."""
        return self.temperature, self.softcap, self.logit_scale, IGNORED

    @property
    def of_chunks(self) -> tuple[Any, ...]:
        return self.accum_dtype, self.chunk_bytes


class TokenLogProbs(Function):
    """log_prob, entropy and lse of `log_prob_forward`, for all ranks' words.

    One all-gather of four numbers a token. The results are the same on every rank, to the last
    bit, and their gradients have to be the same too. The backward computes the rank's part of the
    gradients by the ops' own backward, from the rank's logits and the whole lse and entropy.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, lora_x: Tensor | None,
        lora_b: Tensor | None, target: Tensor, here: Tensor, words: Words, options: Options,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """x is the logits if weight, that of a linear layer, is None; `target` counts from the
        rank's first word, and is to be read where `here` is True."""
        head = (x, weight, bias, lora_x, lora_b)
        log_prob, entropy, lse, error = results_of(head, target, here, words, options)
        ctx.save_for_backward(*head, target, here, entropy, lse, error)
        ctx.words, ctx.options = words, options
        ctx.set_materialize_grads(False)
        return log_prob, entropy, lse

    @staticmethod
    @once
    def backward(
        ctx: Any, dlog_prob: Tensor | None, dentropy: Tensor | None, dlse: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        *head, target, here, entropy, lse, error = ctx.saved_tensors
        results = gradients(
            tuple(head), target, here, (entropy, lse, error), (dlog_prob, dentropy, dlse),
            ctx.words, ctx.options, list(ctx.needs_input_grad[:5]),
        )  # fmt: skip
        return (*results, None, None, None, None)


def results_of(
    head: Layer, target: Tensor, here: Tensor, words: Words, options: Options
) -> list[Tensor]:
    """log_prob, entropy, lse and lse_error, of which an ignored token has 0."""
    results = _of_all_ranks(_of_this_rank(head, target, here, words, options), words)
    return [value.masked_fill(target == IGNORED, 0.0) for value in results]


def gradients(
    head: Layer, target: Tensor, here: Tensor, statistics: tuple[Tensor, Tensor, Tensor],
    grads: tuple[Tensor | None, ...], words: Words, options: Options, wanted: list[bool],
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """The gradients of the head, from those of log_prob, entropy and lse, and from entropy, lse and
    lse_error."""
    x, weight, bias, lora_x, lora_b = head
    dlog_prob, dentropy, dlse = grads
    if dlog_prob is not None:
        # log_prob = x_target - lse: without the target, its gradient is that of -lse.
        of_lse = torch.where(here, 0.0, -dlog_prob)
        dlse = of_lse if dlse is None else dlse + of_lse
        dlog_prob = torch.where(here, dlog_prob, 0.0)
    given = (dlog_prob, dentropy, dlse, x)
    if words.held == 0:
        return zeros_of(head, wanted)
    if weight is None:
        dx = log_prob_backward(*given, target, *statistics, *options.of_op)
        return dx, None, None, None, None
    of_op = (*options.of_op, *options.of_chunks, wanted, lora_x, lora_b)
    return linear_log_prob_backward(*given, weight, target, bias, *statistics, *of_op)


def _of_this_rank(
    head: Layer, target: Tensor, here: Tensor, words: Words, options: Options
) -> Tensor:
    """(4, ...): lse and its error, the target's logit relative to lse and the entropy, of the
    rank's words."""
    x, weight, bias, lora_x, lora_b = head
    if words.held == 0:
        return with_target(words.no_statistics(x, target, 4), 2, here)
    results: tuple[Any, ...]
    if weight is None:
        results = log_prob_forward(x, target, *options.of_op)
    else:
        of_op: Any = (*options.of_op, *options.of_chunks, False, False, False, lora_x, lora_b)
        results = linear_log_prob_forward(x, weight, target, bias, *of_op)
    log_prob, entropy, lse, *_, error = results
    # If all of the rank's words have -inf, so has the target, and log_prob is NaN.
    log_prob = torch.where(lse == float("-inf"), lse, log_prob)
    return with_target(torch.stack([lse, error, log_prob, entropy]), 2, here)


def _of_all_ranks(local: Tensor, words: Words) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """log_prob, entropy, lse and its error of all words, from the statistics of the rank's words.

    With w_r = exp(lse_r - lse), the probability of the words of rank r, the entropy is
    sum_r w_r * (entropy_r - log(w_r)): all of these summands are at least 0.
    """
    ranks = of_each_rank(gathered(local, 0, words.group), local.shape[0])
    lses, errors, targets, entropies = ranks.unbind(1)
    lse, error, log_w = rank_lses(lses, errors)
    w = torch.exp(log_w)
    # A rank of probability 0 adds nothing, though log(w) is -inf.
    entropy = torch.where(w == 0, 0.0, w * (entropies - log_w)).sum(0)
    return target_log_prob(targets, log_w), entropy, lse, error
