"""lse, the target's logit and the sum of the logits of each token, over a sharded vocabulary."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from ..ops.cross_entropy import cross_entropy_backward, cross_entropy_forward, logsumexp
from ..ops.linear_cross_entropy import linear_cross_entropy_backward, linear_cross_entropy_forward
from .collectives import gathered, of_each_rank
from .derivatives import once
from .words import IGNORED, Words, zeros_of

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


class TokenStatistics(Function):
    """lse_i = log(sum_c exp(x_ic)), x_i,target_i, and sum_c weight_c * x_ic or None, for all words
    c; x are the effective logits of `cross_entropy`.

    One all-gather of two or three numbers a token. The results are the same on every rank, to the
    last bit, and their gradients have to be the same too. The backward computes the rank's part of
    the gradients by the ops' own backward, from the rank's logits and the whole lse.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, lora_x: Tensor | None,
        lora_b: Tensor | None, target: Tensor, here: Tensor, class_weight: Tensor | None,
        words: Words, options: Options,
    ) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
        """x is the logits if weight, that of a linear layer, is None; `target` counts from the
        rank's first word, and is to be read where `here` is True."""
        head = (x, weight, bias, lora_x, lora_b)
        local = local_statistics(head, target, here, class_weight, words, options)
        lse, target_logit, total = of_all_ranks(gathered(local, 0, words.group), local)
        ctx.save_for_backward(*head, target, here, class_weight, lse)
        ctx.words, ctx.options = words, options
        ctx.set_materialize_grads(False)
        return lse, target_logit, total

    @staticmethod
    @once
    def backward(
        ctx: Any, dlse: Tensor | None, dtarget_logit: Tensor | None, dtotal: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        *head, target, here, class_weight, lse = ctx.saved_tensors
        wanted = list(ctx.needs_input_grad[:5])
        grads = upstream_here(dlse, dtarget_logit, dtotal, here, class_weight, ctx.words)
        results = gradients(
            tuple(head), target, class_weight, lse, grads, ctx.words, ctx.options, wanted
        )
        return (*results, *(None for _ in range(5)))


def of_logits(logits: Tensor) -> Layer:
    """Logits in the place of x, of no linear layer."""
    return logits, None, None, None, None


def local_statistics(
    head: Layer, target: Tensor, here: Tensor,
    class_weight: Tensor | None, words: Words, options: Options,
) -> Tensor:  # fmt: skip
    """(2 or 3, ...): lse, the target's logit and the sum of the rank's words."""
    x, weight, bias, lora_x, lora_b = head
    if words.held == 0:
        return words.no_statistics(x, target, 2 + options.with_sum)
    results: tuple[Any, ...]
    if weight is None:
        results = cross_entropy_forward(x, target, class_weight, None, None, *options.of_op)
    else:
        given: tuple[Any, ...] = (x, weight, target, bias, class_weight, None, None, *options.of_op)
        given = (*given, *options.of_chunks, False, False, [False] * 5, lora_x, lora_b)
        results = linear_cross_entropy_forward(*given)
    loss, _, lse, target_logit, *_ = results
    parts = [lse, torch.where(here, target_logit, 0.0)]
    if options.with_sum:
        # With a label smoothing of 1, the loss is sum_c weight_c * (lse - x_c) / count.
        parts.append(lse * class_sum(class_weight, words.held, lse) - words.held * loss)
    return torch.stack(parts)


def of_all_ranks(gathered: Tensor, local: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """The statistics of all words, from the gathered ones of the ranks; `local` are one rank's."""
    ranks = of_each_rank(gathered, local.shape[0]).unbind(1)
    lse = logsumexp(ranks[0].movedim(0, -1))
    return lse, ranks[1].sum(0), ranks[2].sum(0) if len(ranks) > 2 else None


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
    head: Layer, target: Tensor, class_weight: Tensor | None, lse: Tensor, grads: Upstream,
    words: Words, options: Options, wanted: list[bool],
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """The gradients of the head, by the backward op of the rank's words, which is given the lse of
    all words."""
    x, weight, bias, lora_x, lora_b = head
    if words.held == 0:
        return zeros_of(head, wanted)
    dloss, dlse, dtarget_logit = grads
    # The reduction "none" does not read the sum of the weights.
    of_tokens: tuple[Any, ...] = (class_weight, None, None, lse, lse.new_ones(()))
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
