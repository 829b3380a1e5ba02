"""Ops on tensors that are sharded over devices."""

from .cross_entropy import cross_entropy, linear_cross_entropy
from .log_prob import linear_log_prob, log_prob

__all__ = ["cross_entropy", "linear_cross_entropy", "linear_log_prob", "log_prob"]
