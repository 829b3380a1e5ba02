"""lse and the surprisals of the target and of all words, over a sharded vocabulary."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from ...ops.heads.linear_cross_entropy import (
    linear_cross_entropy_backward,
    linear_cross_entropy_forward,
)
from ...ops.losses.cross_entropy import (
    centred,
    cross_entropy_backward,
    cross_entropy_forward,
    rounded_lse,
)
from .collectives import gathered, of_each_rank
from .derivatives import once
from .words import IGNORED, ClassSums, Words, zeros_of

Upstream = tuple[Tensor | None, Tensor | None, Tensor | None]


# The tensors of a head, or logits in the place of x.
Layer = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]


class Options(NamedTuple):
    """Of a loss: whether it needs the sum of the logits, and the options of its logits."""

    with_sum: bool
    softcap: float | None
    logit_scale: float
    accum_dtype: torch.dtype | None = None
    chunk_bytes: int | None = None

    @property
    def of_op(self) -> tuple[Any, ...]:
        """ignore_index to logit_scale of the ops, and of the linear ones the chunks' options."""
        return IGNORED, "none", float(self.with_sum), 0.0, self.softcap, self.logit_scale

    @property
    def of_chunks(self) -> tuple[Any, ...]:
        return self.accum_dtype, self.chunk_bytes


class Statistics(NamedTuple):
    """Of each token, and all words c; x are the effective logits of `cross_entropy`."""

    # log(sum_c exp(x_ic)), and what rounding took from it.
    lse: Tensor
    lse_error: Tensor
    # lse_i - x_i,target_i, and sum_c weight_c * (lse_i - x_ic) or None.
    nll: Tensor
    surprisal: Tensor | None

    def reshape(self, shape: torch.Size) -> Statistics:
        surprisal = None if self.surprisal is None else self.surprisal.reshape(shape)
        lse, error, nll = (x.reshape(shape) for x in self[:3])
        return Statistics(lse, error, nll, surprisal)


class TokenStatistics(Function):
    """lse, nll and surprisal of `Statistics`.

    One all-gather of three or four numbers a token. The results are the same on every rank, to the
    last bit, and their gradients have to be the same too. The backward computes the rank's part of
    the gradients by the ops' own backward, from the rank's logits and the whole lse.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, lora_x: Tensor | None,
        lora_b: Tensor | None, target: Tensor, here: Tensor, class_weight: Tensor | None,
        class_sums: ClassSums, words: Words, options: Options,
    ) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
        """x is the logits if weight, that of a linear layer, is None; `target` counts from the
        rank's first word, and is to be read where `here` is True."""
        head = (x, weight, bias, lora_x, lora_b)
        local = local_statistics(head, target, here, class_weight, words, options)
        lse, error, nll, surprisal = of_all_ranks(
            gathered(local, 0, words.group), local, class_sums
        )
        ctx.save_for_backward(*head, target, here, class_weight, lse, error)
        ctx.class_sums, ctx.words, ctx.options = class_sums, words, options
        ctx.set_materialize_grads(False)
        return lse, nll, surprisal

    @staticmethod
    @once
    def backward(
        ctx: Any, dlse: Tensor | None, dnll: Tensor | None, dsurprisal: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        *head, target, here, class_weight, lse, error = ctx.saved_tensors
        wanted = list(ctx.needs_input_grad[:5])
        dtarget_logit = dtotal = None
        if dnll is not None:
            dlse, dtarget_logit = dnll if dlse is None else dlse + dnll, -dnll
        if dsurprisal is not None:
            of_lse = dsurprisal * sum(ctx.class_sums)
            dlse, dtotal = of_lse if dlse is None else dlse + of_lse, -dsurprisal
        grads = upstream_here(dlse, dtarget_logit, dtotal, here, class_weight, ctx.words)
        results = gradients(
            tuple(head), target, class_weight, (lse, error), grads, ctx.words, ctx.options, wanted
        )
        return (*results, *(None for _ in range(6)))


def of_logits(logits: Tensor) -> Layer:
    """Logits in the place of x, of no linear layer."""
    return logits, None, None, None, None


def local_statistics(
    head: Layer, target: Tensor, here: Tensor,
    class_weight: Tensor | None, words: Words, options: Options,
) -> Tensor:  # fmt: skip
    """(3 or 4, ...): of the rank's words, lse and its error, and relative to lse the target's logit
    and the sum of the logits. Without the target the former is inf, which no difference from lse
    is."""
    x, weight, bias, lora_x, lora_b = head
    if words.held == 0:
        return with_target(words.no_statistics(x, target, 3 + options.with_sum), 2, here)
    results: tuple[Any, ...]
    if weight is None:
        results = cross_entropy_forward(x, target, class_weight, None, None, *options.of_op)
    else:
        given: tuple[Any, ...] = (x, weight, target, bias, class_weight, None, None, *options.of_op)
        given = (*given, *options.of_chunks, False, False, [False] * 5, lora_x, lora_b)
        results = linear_cross_entropy_forward(*given)
    loss, _, lse, target_logit, _, _, _, error = results[:8]
    # Where all of the rank's words have -inf, so has lse.
    empty = lse == float("-inf")
    parts = [lse, error, torch.where(empty, lse, (target_logit - lse) - error)]
    if options.with_sum:
        # With a label smoothing of 1, the loss is sum_c weight_c * (lse - x_c) / count.
        parts.append(torch.where(empty, lse, -words.held * loss))
    return with_target(torch.stack(parts), 2, here)


def with_target(local: Tensor, row: int, here: Tensor) -> Tensor:
    """A rank's statistics, whose row of the target is inf where another rank has the target."""
    local[row].masked_fill_(~here, float("inf"))
    return local


def rank_lses(lses: Tensor, errors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """lse of all words and its error, and the logarithms of the ranks' probabilities, from lse and
    its error of each rank's words."""
    highest = lses.detach().amax(0).clamp(min=torch.finfo(lses.dtype).min)
    parts = (lses - highest) + errors
    _, more, log_sum = centred(parts.movedim(0, -1))
    log_sum = more + log_sum
    return *rounded_lse(highest, log_sum), parts - log_sum


def target_log_prob(targets: Tensor, log_w: Tensor) -> Tensor:
    """The logarithm of the target's probability, from those of the ranks and, relative to lse of
    its rank's words, the target's logit; 0 where no rank has the target."""
    return torch.where(targets == float("inf"), 0.0, targets + log_w).sum(0)


def of_all_ranks(gathered: Tensor, local: Tensor, class_sums: ClassSums) -> Statistics:
    """The statistics of all words, from the gathered ones of the ranks; `local` are one rank's."""
    lses, errors, targets, *totals = of_each_rank(gathered, local.shape[0]).unbind(1)
    lse, error, log_w = rank_lses(lses, errors)
    surprisal = None
    if totals:
        # A rank without a word of a probability above 0 has its -inf, if any, in its sum.
        shifts = [log_w[i].masked_fill(lses[i] == -float("inf"), 0.0) for i in range(len(lses))]
        pairs = zip(class_sums, shifts, strict=True)
        surprisal = -totals[0].sum(0) - sum(weights * shift for weights, shift in pairs)
    return Statistics(lse, error, -target_log_prob(targets, log_w), surprisal)


def upstream_here(
    dlse: Tensor | None, dtarget_logit: Tensor | None, dtotal: Tensor | None,
    here: Tensor, class_weight: Tensor | None, words: Words,
) -> Upstream:  # fmt: skip
    """dloss, dlse and dtarget_logit of the op of the rank's words."""
    if dtarget_logit is not None:
        dtarget_logit = torch.where(here, dtarget_logit, 0.0)
    if dtotal is None:
        return None, dlse, dtarget_logit
    # The gradient of the sum is weight_c for each word: that of -count * loss, without lse's part.
    of_lse = dtotal * class_sum(class_weight, words.held, dtotal)
    return -words.held * dtotal, of_lse if dlse is None else dlse + of_lse, dtarget_logit


def class_sum(class_weight: Tensor | None, count: int, like: Tensor) -> Tensor | int:
    return count if class_weight is None else class_weight.to(like.dtype).sum()


def gradients(
    head: Layer, target: Tensor, class_weight: Tensor | None, lse: tuple[Tensor, Tensor],
    grads: Upstream, words: Words, options: Options, wanted: list[bool],
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """The gradients of the head, by the backward op of the rank's words, which is given the lse of
    all words and its error."""
    x, weight, bias, lora_x, lora_b = head
    if words.held == 0:
        return zeros_of(head, wanted)
    dloss, dlse, dtarget_logit = grads
    # The reduction "none" does not read the sum of the weights.
    of_tokens: tuple[Any, ...] = (class_weight, None, None, *lse, lse[0].new_ones(()))
    if weight is None:
        dlogits = cross_entropy_backward(
            dloss, None, dlse, dtarget_logit, x, target, *of_tokens, *options.of_op
        )
        return dlogits, None, None, None, None
    of_op = (*options.of_op, *options.of_chunks, wanted, lora_x, lora_b)
    of_tokens = (*of_tokens, None, None, None, *of_op)
    return linear_cross_entropy_backward(
        dloss, None, dlse, dtarget_logit, x, weight, target, bias, *of_tokens
    )
