"""Losses over a sharded vocabulary: what a rank computes of its words, for process groups and for
DTensors.

`SHARDED_LOSSES` has for each op the functions of its call and of its backward op's call. A call has
the rank's words in place of all; its results are those of all words, as the op's of one device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ...ops.heads.head import HEAD
from ...record import Op
from . import cross_entropy, divergence, linear_divergence, log_prob, top_k
from .shard import VocabShard

Compute = Callable[[Op, Any, VocabShard], tuple[Any, ...]]


class ShardedLoss(NamedTuple):
    """The functions of an op and of its backward op; the tensor that is sharded over words and its
    dimension, the tensor that has the rows, and the tensors that have gradients."""

    forward: Compute
    backward: Compute
    sharded: str
    dim: int
    rows: str
    differentiated: tuple[str, ...]


def _of_logits(module: Any, *logits: str) -> ShardedLoss:
    return ShardedLoss(module.forward, module.backward, logits[0], -1, logits[0], logits)


def _of_head(module: Any, prefix: str = "") -> ShardedLoss:
    names = tuple(f"{prefix}{name}" for name in HEAD)
    return ShardedLoss(module.forward, module.backward, names[1], 0, names[0], names)


SHARDED_LOSSES = {
    "cross_entropy": _of_logits(cross_entropy, "logits"),
    "linear_cross_entropy": _of_head(cross_entropy),
    "log_prob": _of_logits(log_prob, "logits"),
    "linear_log_prob": _of_head(log_prob),
    "linear_top_k_divergence": _of_head(top_k),
    "divergence": _of_logits(divergence, "student_logits", "teacher_logits"),
    "linear_divergence": _of_head(linear_divergence, "student_"),
}
