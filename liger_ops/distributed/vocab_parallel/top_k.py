"""`linear_top_k_divergence` over a sharded vocabulary: the logits of the listed words, and the
logsumexp of all others."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...record import Op
from .shard import VocabShard, summed
from .token_losses import rank_lses


def forward(op: Op, call: Any, shard: VocabShard) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the op's results, with one all-reduce of K + 2 * ranks numbers a token."""
    ids = call.teacher_ids
    is_local = shard.is_local(ids)
    values, rest, error = _local_results(op, call, is_local, shard)
    # Each rank writes its numbers between zeros of the others: the sum is exact in any order, and
    # one all-reduce serves as the all-gather of rest and error too.
    is_own = torch.arange(shard.ranks, device=rest.device) == shard.rank
    of_ranks = [torch.where(is_own, value.unsqueeze(-1), 0.0) for value in (rest, error)]
    total = summed(torch.cat([torch.where(is_local, values, 0.0), *of_ranks], -1), shard.group)
    logits, rests, errors = total.split([ids.shape[-1], shard.ranks, shard.ranks], -1)
    logits = torch.where(ids < shard.V, logits, float("nan"))
    logits = torch.where(ids < 0, -float("inf"), logits)
    rest, error, _ = rank_lses(rests.movedim(-1, 0), errors.movedim(-1, 0))
    # A token that lists no word does not count.
    counts = (ids >= 0).any(-1)
    return logits, torch.where(counts, rest, 0.0), torch.where(counts, error, 0.0)


def backward(op: Op, call: Any, shard: VocabShard) -> tuple[Tensor | None, ...]:
    """Compute the gradients of the rank's words."""
    ids = call.teacher_ids
    # Another rank's word gets an index past the rank's last word, which the op gives no gradient.
    local = torch.where(shard.is_local(ids), ids - shard.first, shard.held)
    return shard.gradients(op, call._replace(teacher_ids=torch.where(ids < 0, -1, local)))


def _local_results(
    op: Op, call: Any, is_local: Tensor, shard: VocabShard
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the logits of the listed words that the rank has, the logsumexp of its other words,
    and its rounding error."""
    ids = call.teacher_ids
    if shard.held == 0:
        none, error = shard.no_statistics(call, ids[..., 0], 2)
        return torch.zeros_like(ids, dtype=none.dtype), none, error
    # The op leaves out a token that lists no word. If all words that a token lists are on other
    # ranks, the rank's first word is listed in place of one of them, and added to the rest below.
    listed = ids >= 0
    instead = listed & (listed.cumsum(-1) == 1) & ~is_local.any(-1, keepdim=True)
    local = torch.where(is_local, ids - shard.first, torch.where(instead, 0, -1))
    values, rest, error = op.overload(*call._replace(teacher_ids=local))
    first = torch.where(instead, values, -float("inf")).amax(-1)
    terms = torch.stack([rest, first]), torch.stack([error, torch.zeros_like(error)])
    rest, error, _ = rank_lses(*terms)
    return values, rest, error
