"""`linear_top_k` over a sharded vocabulary: the words of each rank's own k, and their
log-probabilities among all words."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...library import OPS
from ...ops.heads.linear_top_k import as_log_prob
from ...record import Op
from . import log_prob
from .shard import VocabShard, start_gather, view_by_rank, wait
from .token_losses import rank_lses

INF = float("inf")


def forward(op: Op, call: Any, shard: VocabShard) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the op's results, with an all-gather of k + 2 numbers a token and one of k words."""
    values, words = _local_results(op, call, shard)
    gathers = [start_gather(x.movedim(-1, 0), 0, shard.group) for x in (values, words)]
    values, words = (
        view_by_rank(wait(gather), x.shape[-1])
        for gather, x in zip(gathers, (values, words), strict=True)
    )
    lse, error, log_w = rank_lses(values[:, 0], values[:, 1])
    # Ranks and their words are in ascending order, which a stable sort keeps among equal ones.
    candidates = (values[:, 2:] + log_w.unsqueeze(1)).flatten(0, 1)
    ordered = candidates.sort(dim=0, descending=True, stable=True)
    chosen = ordered.indices.narrow(0, 0, call.k)
    words = words.flatten(0, 1).gather(0, chosen)
    log_prob = ordered.values.narrow(0, 0, call.k)
    return log_prob.movedim(0, -1).contiguous(), lse, words.movedim(0, -1).contiguous(), error


def backward(op: Op, call: Any, shard: VocabShard) -> tuple[Tensor | None, ...]:
    return log_prob.backward(OPS["linear_log_prob_backward"], as_log_prob(call), shard)


def _local_results(op: Op, call: Any, shard: VocabShard) -> tuple[Tensor, Tensor]:
    """Compute of the rank's words, for each token, lse, its rounding error and the k largest
    logits relative to lse, (..., k + 2); and the words of these, (..., k), counted from the first
    of all words. If the rank has fewer words, further ones have logits of -inf."""
    tokens, k = call.x.shape[:-1], min(call.k, shard.held)
    words = call.x.new_zeros((*tokens, call.k - k), dtype=torch.int64)
    if shard.held == 0:
        lse, error = shard.no_statistics(call, words[..., 0], 2)
        log_prob = lse.new_zeros((*tokens, 0))
    else:
        log_prob, lse, own, error = op.overload(*call._replace(k=k))
        words = torch.cat([own + shard.first, words], -1)
        # If all of the rank's logits are -inf, so are these, and log_prob is NaN.
        log_prob = torch.where(lse.unsqueeze(-1) == -INF, -INF, log_prob)
    log_prob = torch.nn.functional.pad(log_prob, (0, call.k - k), value=-INF)
    return torch.cat([lse.unsqueeze(-1), error.unsqueeze(-1), log_prob], -1), words
