"""`log_prob` and `linear_log_prob` of a rank's words: the ops' results and gradients, with the
numbers of all words."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...record import Op
from .collectives import gathered, of_each_rank
from .shard import IGNORED, VocabShard
from .token_losses import rank_lses, target_log_prob, with_target


def forward(op: Op, call: Any, shard: VocabShard) -> tuple[Tensor | None, ...]:
    """One all-gather of four numbers a token.

    With w_r = exp(lse_r - lse), the probability of the words of rank r, the entropy is
    sum_r w_r * (entropy_r - log(w_r)): all of these summands are at least 0.
    """
    own, here = _of_shard(call, shard)
    local = _local(op, own, here, shard)
    ranks = of_each_rank(gathered(local, 0, shard.group), local.shape[0])
    lses, errors, targets, entropies = ranks.unbind(1)
    lse, error, log_w = rank_lses(lses, errors)
    w = torch.exp(log_w)
    # A rank of probability 0 adds nothing, though log(w) is -inf.
    entropy = torch.where(w == 0, 0.0, w * (entropies - log_w)).sum(0)
    results = (target_log_prob(targets, log_w), entropy, lse, error)
    log_prob, entropy, lse, error = (x.masked_fill(own.target == IGNORED, 0.0) for x in results)
    valid = shard.valid(call.target, call.ignore_index)
    return torch.where(valid, log_prob, float("nan")), entropy, lse, None, None, None, error


def backward(op: Op, call: Any, shard: VocabShard) -> tuple[Tensor | None, ...]:
    own, here = _of_shard(call, shard)
    if own.dlog_prob is not None:
        # log_prob = x_target - lse: without the target, its gradient is that of -lse.
        of_lse = torch.where(here, 0.0, -own.dlog_prob)
        dlse = of_lse if own.dlse is None else own.dlse + of_lse
        own = own._replace(dlog_prob=torch.where(here, own.dlog_prob, 0.0), dlse=dlse)
    return shard.gradients(op, own)


def _of_shard(call: Any, shard: VocabShard) -> tuple[Any, Tensor]:
    """The call of the rank's words, and whether each token's target is among them."""
    target = shard.local(call.target, call.ignore_index)
    return call._replace(target=target, ignore_index=IGNORED), shard.here(call.target)


def _local(op: Op, own: Any, here: Tensor, shard: VocabShard) -> Tensor:
    """(4, ...): lse and its error, the target's logit relative to lse and the entropy, of the
    rank's words."""
    if shard.held == 0:
        return with_target(shard.no_statistics(own, own.target, 4), 2, here)
    log_prob, entropy, lse, *_, error = op.overload(*own)
    # If all of the rank's words have -inf, so has the target, and log_prob is NaN.
    log_prob = torch.where(lse == float("-inf"), lse, log_prob)
    return with_target(torch.stack([lse, error, log_prob, entropy]), 2, here)
