"""`log_prob` and `linear_log_prob` over a sharded vocabulary: the ops' results for all words, and
the gradients of the rank's words."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...ops.losses.log_prob import has_words
from ...record import Op
from .shard import IGNORED, VocabShard, gathered, view_by_rank
from .token_losses import rank_lses, target_log_prob


def forward(op: Op, call: Any, shard: VocabShard) -> tuple[Tensor | None, ...]:
    """Compute the op's results, with one all-gather of four numbers a token, or of three and one
    for each of its K targets.

    With w_r = exp(lse_r - lse), the probability of the words of rank r, the entropy is
    sum_r w_r * (entropy_r - log(w_r)), of which no term is negative.
    """
    local_call, is_local = _localise(call, shard)
    local = _local_statistics(op, local_call, is_local, shard)
    ranks = view_by_rank(gathered(local, 0, shard.group), local.shape[0])
    lses, errors, entropies, targets = ranks[:, 0], ranks[:, 1], ranks[:, 2], ranks[:, 3:]
    lse, error, log_w = rank_lses(lses, errors)
    w = torch.exp(log_w)
    # A rank of probability 0 adds nothing, though log(w) is -inf.
    entropy = torch.where(w == 0, 0.0, w * (entropies - log_w)).sum(0)
    log_prob = target_log_prob(targets, log_w.unsqueeze(1)).movedim(0, -1)
    ignored = of_tokens = local_call.target == IGNORED
    if has_words(call):
        of_tokens = ignored.all(-1)
    else:
        log_prob = log_prob.squeeze(-1)
    entropy, lse, error = (x.masked_fill(of_tokens, 0.0) for x in (entropy, lse, error))
    valid = shard.valid(call.target, call.ignore_index)
    log_prob = torch.where(valid, log_prob.masked_fill(ignored, 0.0), float("nan"))
    return log_prob, entropy, lse, None, None, None, error


def backward(op: Op, call: Any, shard: VocabShard) -> tuple[Tensor | None, ...]:
    local_call, is_local = _localise(call, shard)
    if local_call.dlog_prob is not None:
        # log_prob = x_target - lse. On a rank without the target, only -lse has a gradient.
        added = torch.where(is_local, 0.0, -local_call.dlog_prob)
        if has_words(call):
            added = added.masked_fill(local_call.target == IGNORED, 0.0).sum(-1)
        dlse = added if local_call.dlse is None else local_call.dlse + added
        local_call = local_call._replace(
            dlog_prob=torch.where(is_local, local_call.dlog_prob, 0.0), dlse=dlse
        )
    return shard.gradients(op, local_call)


def _localise(call: Any, shard: VocabShard) -> tuple[Any, Tensor]:
    """Return the call for the op of the rank's words, and whether each token's target is among
    them."""
    target = shard.local_index(call.target, call.ignore_index)
    return call._replace(target=target, ignore_index=IGNORED), shard.is_local(call.target)


def _local_statistics(op: Op, local_call: Any, is_local: Tensor, shard: VocabShard) -> Tensor:
    """Compute the statistics of the rank's words, (4, ...) or (3 + K, ...): lse, its rounding
    error, the entropy, and each target's logit relative to lse."""
    if not has_words(local_call):
        is_local = is_local.unsqueeze(-1)
    if shard.held == 0:
        of_tokens = shard.no_statistics(local_call, is_local[..., 0], 3)
        log_prob = torch.zeros_like(is_local, dtype=of_tokens.dtype)
    else:
        log_prob, entropy, lse, *_, error = op.overload(*local_call)
        of_tokens, log_prob = torch.stack([lse, error, entropy]), log_prob.view(is_local.shape)
        # If all of the rank's logits are -inf, so is the target's, and log_prob is NaN.
        log_prob = torch.where(lse.unsqueeze(-1) == float("-inf"), float("-inf"), log_prob)
    log_prob = log_prob.masked_fill(~is_local, float("inf"))
    return torch.cat([of_tokens, log_prob.movedim(-1, 0)])
