"""`linear_top_k_divergence` of a rank's words: the logits of listed words, and the logsumexp of all
others."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...record import Op
from .collectives import summed
from .shard import VocabShard
from .token_losses import rank_lses


def forward(op: Op, call: Any, shard: VocabShard) -> tuple[Tensor, Tensor, Tensor]:
    """One all-reduce of K numbers a token and two for each rank."""
    ids = call.teacher_ids
    here = shard.here(ids)
    values, rest, error = _of_this_rank(op, call, here, shard)
    # The sum of one rank's number and zeros is that number, in whatever order.
    own = torch.arange(shard.ranks, device=rest.device) == shard.rank
    of_ranks = [torch.where(own, value.unsqueeze(-1), 0.0) for value in (rest, error)]
    total = summed(torch.cat([torch.where(here, values, 0.0), *of_ranks], -1), shard.group)
    logits, rests, errors = total.split([ids.shape[-1], shard.ranks, shard.ranks], -1)
    logits = torch.where(ids < shard.V, logits, float("nan"))
    logits = torch.where(ids < 0, -float("inf"), logits)
    rest, error, _ = rank_lses(rests.movedim(-1, 0), errors.movedim(-1, 0))
    counts = (ids >= 0).any(-1)
    return logits, torch.where(counts, rest, 0.0), torch.where(counts, error, 0.0)


def backward(op: Op, call: Any, shard: VocabShard) -> tuple[Tensor | None, ...]:
    """Another rank's word is one that the rank's weight lacks."""
    ids = call.teacher_ids
    local = torch.where(shard.here(ids), ids - shard.first, shard.held)
    return shard.gradients(op, call._replace(teacher_ids=torch.where(ids < 0, -1, local)))


def _of_this_rank(
    op: Op, call: Any, here: Tensor, shard: VocabShard
) -> tuple[Tensor, Tensor, Tensor]:
    """The logits of the listed words that are the rank's, and the logsumexp of its others and its
    error."""
    ids = call.teacher_ids
    if shard.held == 0:
        none, error = shard.no_statistics(call, ids[..., 0], 2)
        return torch.zeros_like(ids, dtype=none.dtype), none, error
    # The op takes a token that lists no word for one that does not count. Where all listed words
    # are other ranks', the rank's first word is listed in the place of one of them.
    listed = ids >= 0
    instead = listed & (listed.cumsum(-1) == 1) & ~here.any(-1, keepdim=True)
    local = torch.where(here, ids - shard.first, torch.where(instead, 0, -1))
    values, rest, error = op.overload(*call._replace(teacher_ids=local))
    first = torch.where(instead, values, -float("inf")).amax(-1)
    both = torch.stack([rest, first]), torch.stack([error, torch.zeros_like(error)])
    rest, error, _ = rank_lses(*both)
    return values, rest, error
