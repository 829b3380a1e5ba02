"""The logits of listed words, and the logsumexp of all others, over a sharded vocabulary."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from ...ops.heads.linear_top_k_divergence import (
    linear_top_k_divergence_backward,
    linear_top_k_divergence_forward,
)
from .collectives import summed
from .derivatives import once
from .products import Head
from .token_log_probs import Options
from .token_statistics import rank_lses
from .words import Words, zeros_of


class TokenTopK(Function):
    """logits, rest and rest_error of `linear_top_k_divergence_forward`, for all ranks' words.

    One all-reduce of K numbers a token and two for each rank. The results are the same on every
    rank, to the last bit, and their gradients have to be the same too. The backward computes the
    rank's part of the gradients by the op's own backward, from the rank's logits and the whole
    rest.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, lora_x: Tensor | None,
        lora_b: Tensor | None, ids: Tensor, words: Words, options: Options,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        head = Head(x, weight, bias, lora_x, lora_b)
        logits, rest, error = results_of(head, ids, words, options)
        ctx.save_for_backward(*head, ids, logits, rest, error)
        ctx.mark_non_differentiable(error)
        ctx.words, ctx.options = words, options
        ctx.set_materialize_grads(False)
        return logits, rest, error

    @staticmethod
    @once
    def backward(ctx: Any, dlogits: Tensor | None, drest: Tensor | None, _: Any) -> tuple[Any, ...]:
        *head, ids, logits, rest, error = ctx.saved_tensors
        wanted = list(ctx.needs_input_grad[:5])
        given = (
            dlogits,
            drest,
            Head(*head),
            ids,
            logits,
            (rest, error),
            ctx.words,
            ctx.options,
            wanted,
        )
        return (*gradients(*given), None, None, None)


def results_of(
    head: Head, ids: Tensor, words: Words, options: Options
) -> tuple[Tensor, Tensor, Tensor]:
    """logits, rest and rest_error, from `ids` of the whole vocabulary."""
    here = words.here(ids)
    values, rest, error = _of_this_rank(head, ids, here, words, options)
    # The sum of one rank's number and zeros is that number, in whatever order.
    own = torch.arange(words.ranks, device=rest.device) == words.rank
    of_ranks = [torch.where(own, value.unsqueeze(-1), 0.0) for value in (rest, error)]
    total = summed(torch.cat([torch.where(here, values, 0.0), *of_ranks], -1), words.group)
    logits, rests, errors = total.split([ids.shape[-1], words.ranks, words.ranks], -1)
    logits = torch.where(ids < words.V, logits, float("nan"))
    logits = torch.where(ids < 0, -float("inf"), logits)
    rest, error, _ = rank_lses(rests.movedim(-1, 0), errors.movedim(-1, 0))
    counts = (ids >= 0).any(-1)
    return logits, torch.where(counts, rest, 0.0), torch.where(counts, error, 0.0)


def gradients(
    dlogits: Tensor | None, drest: Tensor | None, head: Head, ids: Tensor, logits: Tensor,
    rest: tuple[Tensor, Tensor], words: Words, options: Options, wanted: list[bool],
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """The gradients of the head, by the backward op of the rank's words, which is given the rest of
    all words and its error. Another rank's word is one that the rank's weight lacks."""
    if words.held == 0:
        return zeros_of(head, wanted)
    local = torch.where(words.here(ids), ids - words.first, words.held)
    local = torch.where(ids < 0, -1, local)
    x, weight, bias, lora_x, lora_b = head
    of_op: Any = (logits, *rest, *options, wanted, lora_x, lora_b)
    return linear_top_k_divergence_backward(dlogits, drest, x, weight, local, bias, *of_op)


def _of_this_rank(
    head: Head, ids: Tensor, here: Tensor, words: Words, options: Options
) -> tuple[Tensor, Tensor, Tensor]:
    """The logits of the listed words that are the rank's, and the logsumexp of its others and its
    error."""
    x, weight, bias, lora_x, lora_b = head
    if words.held == 0:
        none, error = words.no_statistics(x, ids[..., 0], 2)
        return torch.zeros_like(ids, dtype=none.dtype), none, error
    # The op takes a token that lists no word for one that does not count. Where all listed words
    # are other ranks', the rank's first word is listed in the place of one of them.
    listed = ids >= 0
    instead = listed & (listed.cumsum(-1) == 1) & ~here.any(-1, keepdim=True)
    local = torch.where(here, ids - words.first, torch.where(instead, 0, -1))
    values, rest, error = linear_top_k_divergence_forward(
        x, weight, local, bias, *options, lora_x, lora_b
    )
    first = torch.where(instead, values, -float("inf")).amax(-1)
    both = torch.stack([rest, first]), torch.stack([error, torch.zeros_like(error)])
    rest, error, _ = rank_lses(*both)
    return values, rest, error
