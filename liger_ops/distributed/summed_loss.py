"""The sum of the losses of a head over a sharded vocabulary; the forward computes its gradients."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from ..ops.chunks import BACKWARD_BYTES, TILE, from_environment
from ..ops.handed_over import hand_over, nobody_else_sees_the_gradients
from ..ops.head import (
    accumulation_dtype,
    factors_of,
    forward_dweight_dtype,
    forward_gradient_dtype,
)
from .collectives import start_gather, start_sum, wait
from .derivatives import once
from .loss_of_tokens import Terms, Tokens, gradients_of_sum, losses
from .products import added, rounded
from .token_statistics import Options, gradients, local_statistics, of_all_ranks, upstream_here
from .words import IGNORED, Words


def summed_loss(
    x: Tensor, weight: Tensor, bias: Tensor | None, tokens: Tokens, terms: Terms,
    words: Words, options: Options, sums_x: bool,
) -> Tensor:  # fmt: skip
    """The sum of the tokens' losses. With sums_x, the gradient of x is summed over the ranks."""
    rows = x.reshape(tokens.target.numel(), x.shape[-1])
    flat = tokens.flat()
    return SummedLoss.apply(rows, weight, bias, *flat, terms, words, options, sums_x)


class SummedLoss(Function):
    """A chunk of tokens at a time: the rank's logits, the all-gather of their statistics, the
    gradient of the logits, and its products with weight and x.

    The logits of the next chunk are computed while the statistics are gathered, and the gradient
    of weight while that of x is summed over the ranks.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, here: Tensor,
        valid: Tensor, within: Tensor, token_weights: Tensor, counts: Tensor,
        class_weight: Tensor | None, class_sum: Tensor | int,
        terms: Terms, words: Words, options: Options, sums_x: bool,
    ) -> Tensor:  # fmt: skip
        of_tokens = (target, here, valid, within, token_weights, counts)
        tokens = Tokens.of_flat(of_tokens, class_weight, class_sum)
        wanted = list(ctx.needs_input_grad[:3])
        head = _Head(rows, weight, bias, tokens, terms, words, options, wanted, sums_x)
        lses, target_logits, totals = zip(
            *(head.finished(chunk) for chunk in head.chunks()), strict=True
        )
        lse, target_logit = torch.cat(lses), torch.cat(target_logits)
        total = None if totals[0] is None else torch.cat(totals)
        dx, dweight, dbias = head.results()
        with nobody_else_sees_the_gradients():
            tracing = torch.compiler.is_compiling()
            ctx.handed_over = [] if tracing else hand_over(dweight, weight.dtype)
        ctx.has_dweight = dweight is not None
        saved = None if ctx.handed_over else dweight
        ctx.save_for_backward(rows, weight, bias, *of_tokens, class_weight, lse, dx, saved, dbias)
        ctx.class_sum, ctx.given = class_sum, (terms, words, options)
        return losses(lse, target_logit, total, tokens, terms)[0].sum()

    @staticmethod
    @once
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        # Read only once, because a checkpoint recomputes the saved tensors at each access.
        rows, weight, bias, *of_tokens, class_weight, lse, dx, dweight, dbias = ctx.saved_tensors
        of_rows, of_weight, of_bias, *_ = factors_of(dloss, of_tokens[0], IGNORED, 1)
        if ctx.handed_over:
            # A second backward finds none, and computes it again.
            dweight = ctx.handed_over.pop().mul_(of_weight)
        elif dweight is not None:
            dweight = (dweight * of_weight).to(weight.dtype)
        elif ctx.has_dweight:
            terms, words, options = ctx.given
            tokens = Tokens.of_flat(of_tokens, class_weight, ctx.class_sum)
            grads = gradients_of_sum(lse, tokens, terms, of_weight.reshape(()))
            upstream = upstream_here(*grads, tokens.here, class_weight, words)
            dweight = gradients(
                rows, weight, bias, tokens.target, class_weight, lse, upstream,
                words, options, [False, True, False],
            )[1]  # fmt: skip
        if dx is not None:
            dx = (dx * of_rows).to(rows.dtype)
        if dbias is not None:
            dbias = (dbias * of_bias).to(rows.dtype)
        return (dx, dweight, dbias, *(None for _ in range(12)))


class Chunk(NamedTuple):
    rows: Tensor
    tokens: Tokens
    logits: Tensor
    # The statistics of the rank's words, and of all ranks', for which `wait` waits.
    local: Tensor
    gathering: Tensor


def chunk_size(row_bytes: int, chunk_bytes: int | None) -> int:
    """The number of tokens of a chunk of at most chunk_bytes, or one. It is a number while the
    number of all tokens is a symbol: a graph depends on the number of chunks alone."""
    most = chunk_bytes or from_environment() or BACKWARD_BYTES
    fitting = max(1, most // max(1, row_bytes))
    return fitting if fitting < TILE else fitting // TILE * TILE


class _Head:
    """The chunks of a head, and its gradients so far."""

    def __init__(
        self, rows: Tensor, weight: Tensor, bias: Tensor | None, tokens: Tokens, terms: Terms,
        words: Words, options: Options, wanted: list[bool], sums_x: bool,
    ) -> None:  # fmt: skip
        self.rows, self.weight, self.bias, self.tokens = rows, weight, bias, tokens
        self.terms, self.words, self.options = terms, words, options
        self.wanted, self.sums_x = wanted, sums_x
        # All ranks have as many chunks, whatever number of words they have.
        row_bytes = words.most * rows.element_size()
        self.size = chunk_size(row_bytes, options.chunk_bytes)
        sum_dtype = accumulation_dtype(weight, options.accum_dtype)
        rounds_once = options.accum_dtype is None and weight.dtype is torch.bfloat16
        if rounds_once and rows.shape[0] <= self.size:
            sum_dtype = weight.dtype
        self.dx: list[Tensor] = []
        self.sum_dtype = sum_dtype
        self.dweight: Tensor | None = None
        self.dbias: Tensor | None = None

    def chunks(self) -> Iterator[Chunk]:
        """Yield each chunk of tokens after the next one's logits were computed: meanwhile its
        statistics are gathered."""
        last = None
        size = self.size
        for rows, tokens in zip(self.rows.split(size), self.tokens.split(size), strict=True):
            logits = torch.nn.functional.linear(rows, self.weight, self.bias)
            local = local_statistics(
                logits, None, None, tokens.target, tokens.here, tokens.class_weight,
                self.words, self.options,
            )  # fmt: skip
            gathering = start_gather(local, 0, self.words.group)
            if last is not None:
                yield last
            last = Chunk(rows, tokens, logits, local, gathering)
        assert last is not None
        yield last

    def finished(self, chunk: Chunk) -> tuple[Tensor, Tensor, Tensor | None]:
        """Add the gradients of a chunk, and return its statistics."""
        tokens = chunk.tokens
        lse, target_logit, total = of_all_ranks(wait(chunk.gathering), chunk.local)
        upstream = upstream_here(
            *gradients_of_sum(lse, tokens, self.terms),
            tokens.here, tokens.class_weight, self.words,
        )  # fmt: skip
        dlogits, _, _ = gradients(
            chunk.logits, None, None, tokens.target, tokens.class_weight, lse, upstream,
            self.words, self.options, [True, False, False],
        )  # fmt: skip
        assert dlogits is not None
        if self.wanted[0]:
            dx = added(None, dlogits, self.weight, forward_gradient_dtype(self.weight))
            self.dx.append(start_sum(dx, self.words.group) if self.sums_x else dx)
        if self.wanted[1]:
            self.dweight = added(self.dweight, dlogits.t(), chunk.rows, self.sum_dtype)
        if self.wanted[2]:
            part = dlogits.sum(0, dtype=lse.dtype)
            self.dbias = part if self.dbias is None else self.dbias + part
        return lse, target_logit, total

    def results(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        dx = torch.cat([wait(part) for part in self.dx]) if self.dx else None
        dtype = forward_dweight_dtype(self.weight, self.options.accum_dtype)
        dweight = rounded(self.dweight, dtype)
        return dx, dweight, rounded(self.dbias, forward_gradient_dtype(self.weight))
