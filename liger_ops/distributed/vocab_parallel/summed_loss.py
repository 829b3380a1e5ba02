"""The sum of the losses of a head over a sharded vocabulary; the forward computes its gradients."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from ...ops.heads.head import factors_of
from ...ops.heads.precomputed_gradient import gradients_are_private, hand_over
from ...ops.heads.scaling import scale_
from .chunk_sizes import loss_chunk_size
from .collectives import start_gather, wait
from .derivatives import once
from .loss_of_tokens import Terms, Tokens, gradients_of_sum, losses
from .products import Head, HeadGradients, each_scaled
from .token_statistics import (
    Options,
    Statistics,
    gradients,
    local_statistics,
    of_all_ranks,
    of_logits,
    upstream_here,
)
from .words import IGNORED, ClassSums, Words


def summed_loss(
    head: Head, tokens: Tokens, terms: Terms, words: Words, options: Options, sums_x: bool
) -> Tensor:
    """The sum of the tokens' losses. With sums_x, the gradients of rows and lora_x are summed over
    the ranks."""
    return SummedLoss.apply(*head, *tokens.flat(), terms, words, options, sums_x)


class SummedLoss(Function):
    """A chunk of tokens at a time: the rank's logits, the all-gather of their statistics, the
    gradient of the logits, and its products with weight and x.

    The logits of the next chunk are computed while the statistics are gathered, and the gradient
    of weight while that of x is summed over the ranks.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, lora_x: Tensor | None,
        lora_b: Tensor | None, target: Tensor, here: Tensor,
        valid: Tensor, within: Tensor, token_weights: Tensor, counts: Tensor,
        class_weight: Tensor | None, class_sums: ClassSums,
        terms: Terms, words: Words, options: Options, sums_x: bool,
    ) -> Tensor:  # fmt: skip
        of_tokens = (target, here, valid, within, token_weights, counts)
        tokens = Tokens.of_flat(of_tokens, class_weight, class_sums)
        head = Head(rows, weight, bias, lora_x, lora_b)
        wanted = list(ctx.needs_input_grad[:5])
        chunked = ChunkedLoss(head, tokens, terms, words, options, wanted, sums_x)
        lse, error, nll, surprisal = chunked.statistics()
        computed = chunked.gradients.results()
        ctx.has_dweight = computed[1] is not None
        with gradients_are_private():
            tracing = torch.compiler.is_compiling()
            ctx.handed_over = [] if tracing else hand_over(computed[1], weight.dtype)
        if ctx.handed_over:
            computed[1] = None
        ctx.save_for_backward(*head, *of_tokens, class_weight, lse, error, *computed)
        ctx.class_sums, ctx.given = class_sums, (terms, words, options)
        return losses(lse, nll, surprisal, tokens, terms)[0].sum()

    @staticmethod
    @once
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        # Read only once, because a checkpoint recomputes the saved tensors at each access.
        saved = ctx.saved_tensors
        head, of_tokens, (class_weight, lse, error), computed = (
            Head(*saved[:5]), saved[5:11], saved[11:14], saved[14:],
        )  # fmt: skip
        factors = factors_of(dloss, of_tokens[0], IGNORED, 1)
        grads = each_scaled(computed, factors, head)
        if ctx.handed_over:
            # A second backward finds none, and computes it again.
            grads[1] = scale_(ctx.handed_over.pop(), factors[1])
        elif ctx.has_dweight and grads[1] is None:
            terms, words, options = ctx.given
            tokens = Tokens.of_flat(of_tokens, class_weight, ctx.class_sums)
            of_sum = gradients_of_sum(lse, tokens, terms, factors[1].reshape(()))
            upstream = upstream_here(*of_sum, tokens.here, class_weight, words)
            grads[1] = gradients(
                head, tokens.target, class_weight, (lse, error), upstream,
                words, options, [False, True, False, False, False],
            )[1]  # fmt: skip
        return (*grads, *(None for _ in range(12)))


class Chunk(NamedTuple):
    head: Head
    tokens: Tokens
    # In a list, from which the last reader takes them.
    logits: list[Tensor]
    # The statistics of the rank's words, and of all ranks', for which `wait` waits.
    local: Tensor
    gathering: Tensor


class ChunkedLoss:
    """The chunks of a head, and its gradients so far."""

    def __init__(
        self, head: Head, tokens: Tokens, terms: Terms, words: Words, options: Options,
        wanted: list[bool], sums_x: bool,
    ) -> None:  # fmt: skip
        self.head, self.tokens = head, tokens
        self.terms, self.words, self.options = terms, words, options
        self.size = loss_chunk_size(
            head, words, wanted, options.chunk_bytes, options.accum_dtype
        )  # fmt: skip
        group = words.group if sums_x else None
        self.gradients = HeadGradients(head, wanted, group, self.size, options.accum_dtype, True)

    def statistics(self) -> Statistics:
        """The statistics of all tokens; the gradients are then those of all."""
        chunks = [self.finished(chunk) for chunk in self.chunks()]
        *columns, surprisals = zip(*chunks, strict=True)
        surprisal = None if surprisals[0] is None else torch.cat(surprisals)
        lse, error, nll = map(torch.cat, columns)
        return Statistics(lse, error, nll, surprisal)

    def chunks(self) -> Iterator[Chunk]:
        """Yield each chunk of tokens after the next one's logits were computed: meanwhile its
        statistics are gathered."""
        last = None
        size = self.size
        for head, tokens in zip(self.head.split(size), self.tokens.split(size), strict=True):
            logits = head.logits()
            local = local_statistics(
                of_logits(logits), tokens.target, tokens.here, tokens.class_weight,
                self.words, self.options,
            )  # fmt: skip
            gathering = start_gather(local, 0, self.words.group)
            if last is not None:
                yield last
            last = Chunk(head, tokens, [logits], local, gathering)
            del logits
        assert last is not None
        yield last

    def finished(self, chunk: Chunk) -> Statistics:
        """Add the gradients of a chunk, and return its statistics."""
        tokens = chunk.tokens
        found = of_all_ranks(wait(chunk.gathering), chunk.local, tokens.class_sums)
        upstream = upstream_here(
            *gradients_of_sum(found.lse, tokens, self.terms),
            tokens.here, tokens.class_weight, self.words,
        )  # fmt: skip
        # The logits are not in memory beside the products of their gradient.
        dlogits = gradients(
            of_logits(chunk.logits.pop()), tokens.target, tokens.class_weight, found[:2], upstream,
            self.words, self.options, [True, False, False, False, False],
        )[0]  # fmt: skip
        assert dlogits is not None
        self.gradients.add(chunk.head, dlogits)
        return found
