"""The divergences and cross-entropies of two heads over a sharded vocabulary, and their sum, whose
forward computes the gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from ...ops.heads.head import factors_of
from ...ops.heads.precomputed_gradient import gradients_are_private, hand_over
from ...ops.heads.scaling import scale_
from ...ops.heads.two_heads import upstream_of_sum
from .derivatives import once
from .products import Head, each_scaled
from .token_divergences import Found
from .two_heads import Labels, Options, Statistics, TwoHeads, joined
from .words import IGNORED, Words

# The tensors of a call: the student's head, the teacher's and its logits, and its labels. And the
# statistics of its tokens.
HEAD, TENSORS = 5, 14
STATISTICS = len(Found._fields) + 3


class SummedDivergence(Function):
    """The sum of the tokens' losses, and the statistics of the tokens, which have no gradient: see
    `TokenTerms`. A chunk of tokens at a time, as in `SummedLoss`."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, ...]:
        tensors, (weights, words, options, factors, sums_x) = (
            arguments[:TENSORS], arguments[TENSORS:],
        )  # fmt: skip
        heads = two_heads(tensors, words, options)
        gradients = heads.gradients(list(ctx.needs_input_grad[:HEAD]), sums_x, True)
        soft, hard = upstream_of_sum(weights, *factors)
        chunks = []
        for chunk, statistics in heads.with_statistics():
            gradients.add(chunk.head, heads.dlogits(chunk, statistics, (soft, hard)))
            chunks.append(statistics)
        statistics, computed = joined(chunks), gradients.results()
        ctx.has_dweight = computed[1] is not None
        with gradients_are_private():
            tracing = torch.compiler.is_compiling()
            ctx.handed_over = [] if tracing else hand_over(computed[1], tensors[1].dtype)
        if ctx.handed_over:
            computed[1] = None
        found = [value for value in statistics.flat() if value is not None]
        # A result that is saved would be one of Dynamo's two names of the same tensor.
        saved = [None if value is None else value.clone() for value in statistics.flat()]
        ctx.save_for_backward(*tensors, weights, *saved, *computed)
        ctx.given = (words, options, factors)
        ctx.mark_non_differentiable(*found)
        loss = weights.new_zeros(())
        if soft is not None:
            loss = (statistics.found.divergence * soft).sum()
        if hard is not None:
            loss = loss + (cross_entropy_of(statistics) * hard).sum()
        return (loss, *found)

    @staticmethod
    @once
    def backward(ctx: Any, dloss: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        # Read only once, because a checkpoint recomputes the saved tensors at each access.
        saved = ctx.saved_tensors
        tensors, weights, computed = (
            saved[:TENSORS],
            saved[TENSORS],
            saved[TENSORS + 1 + STATISTICS :],
        )
        of_loss = factors_of(dloss, tensors[11], IGNORED, 1)
        grads = each_scaled(computed, of_loss, Head(*tensors[:HEAD]))
        if ctx.handed_over:
            # A second backward finds none, and computes it again.
            grads[1] = scale_(ctx.handed_over.pop(), of_loss[1])
        elif ctx.has_dweight and grads[1] is None:
            words, options, factors = ctx.given
            statistics = Statistics.of_flat(saved[TENSORS + 1 : TENSORS + 1 + STATISTICS])
            upstream = upstream_of_sum(weights * of_loss[1].reshape(()), *factors)
            wanted = [False, True, False, False, False]
            heads = two_heads(tensors, words, options)
            grads[1] = again(heads, statistics, upstream, wanted, False)[1]
        return (*grads, *(None for _ in range(TENSORS - HEAD + 5)))


class TokenTerms(Function):
    """Each token's divergence and cross-entropy, if it has labels: from its statistics, if they are
    given. The backward computes the logits again."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, ...]:
        tensors, given = arguments[:TENSORS], arguments[TENSORS : TENSORS + STATISTICS]
        words, options, sums_x = arguments[TENSORS + STATISTICS :]
        if given[0] is None:
            heads = two_heads(tensors, words, options)
            statistics = joined([found for _, found in heads.with_statistics()])
        else:
            statistics = Statistics.of_flat(given)
        ctx.save_for_backward(*tensors, *statistics.flat())
        ctx.given = (words, options, sums_x)
        ctx.set_materialize_grads(False)
        divergence = statistics.found.divergence.clone()
        if statistics.lse is None:
            return (divergence,)
        return divergence, cross_entropy_of(statistics)

    @staticmethod
    @once
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        saved, (words, options, sums_x) = ctx.saved_tensors, ctx.given
        tensors, statistics = saved[:TENSORS], Statistics.of_flat(saved[TENSORS:])
        soft, hard = (*upstream, None)[:2]
        wanted = list(ctx.needs_input_grad[:HEAD])
        heads = two_heads(tensors, words, options)
        grads = again(heads, statistics, (soft, hard), wanted, sums_x)
        return (*grads, *(None for _ in range(TENSORS - HEAD + STATISTICS + 3)))


def two_heads(tensors: Any, words: Words, options: Options) -> TwoHeads:
    student, teacher, logits, labels = (
        Head(*tensors[:HEAD]), tensors[HEAD : 2 * HEAD], tensors[10], tensors[11:TENSORS],
    )  # fmt: skip
    return TwoHeads(
        student, Head(*teacher) if logits is None else logits,
        None if labels[0] is None else Labels(*labels), words, options,
    )  # fmt: skip


def cross_entropy_of(statistics: Statistics) -> Tensor:
    assert statistics.nll is not None
    # A result of a function is another tensor than its arguments.
    return statistics.nll.clone()


def again(
    heads: TwoHeads, statistics: Statistics, upstream: Any, wanted: list[bool], sums_x: bool
) -> list[Tensor | None]:
    """The gradients of the student's head, from logits that are computed again."""
    gradients = heads.gradients(wanted, sums_x, False)
    for chunk in heads.chunks():
        gradients.add(chunk.head, heads.dlogits(chunk, statistics.of(chunk.tokens), upstream))
    return [
        None if gradient is None or tensor is None else gradient.to(tensor.dtype)
        for gradient, tensor in zip(gradients.results(), heads.student, strict=True)
    ]
