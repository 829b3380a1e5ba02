"""Losses over a sharded vocabulary, computed by each rank from its words, for process groups and
DTensors.

`SHARDED_LOSSES` has for each op two functions, of its call and of its backward op's call. The
tensors of a call have the rank's words alone; the results are those of the op for all words.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ...ops.heads.head import HEAD
from ...record import Op
from . import (
    cross_entropy,
    divergence,
    linear_divergence,
    log_prob,
    most_probable,
    score_centering,
    top_k,
)
from .shard import VocabShard

Compute = Callable[[Op, Any, VocabShard], tuple[Any, ...]]


class ShardedLoss(NamedTuple):
    """The computation of a loss over a sharded vocabulary."""

    # Compute the results of the op, and of its backward op.
    forward: Compute
    backward: Compute
    # The tensor that is sharded over words, and its dimension of words.
    sharded: str
    dim: int
    # The tensor that has a row for each token.
    rows: str
    # The tensors that have gradients.
    differentiated: tuple[str, ...]


def _logits_loss(module: Any, *logits: str) -> ShardedLoss:
    return ShardedLoss(module.forward, module.backward, logits[0], -1, logits[0], logits)


def _head_loss(module: Any, prefix: str = "") -> ShardedLoss:
    names = tuple(f"{prefix}{name}" for name in HEAD)
    return ShardedLoss(module.forward, module.backward, names[1], 0, names[0], names)


# The arguments with a weight for each word, of which every rank has all.
CLASS_WEIGHTS = {"cross_entropy": "weight", "linear_cross_entropy": "class_weight"}
SHARDED_LOSSES = {
    "cross_entropy": _logits_loss(cross_entropy, "logits"),
    "linear_cross_entropy": _head_loss(cross_entropy),
    "log_prob": _logits_loss(log_prob, "logits"),
    "linear_log_prob": _head_loss(log_prob),
    "linear_score_centering": _head_loss(score_centering),
    "linear_top_k": _head_loss(most_probable),
    "linear_top_k_divergence": _head_loss(top_k),
    "divergence": _logits_loss(divergence, "student_logits", "teacher_logits"),
    "linear_divergence": _head_loss(linear_divergence, "student_"),
}
