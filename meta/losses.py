"""Losses: the number of classes, the divisor of a mean, the known statistics of a divergence, and
the number of experts that a router selects.
"""

from __future__ import annotations

from typing import Any

import torch

from ..ops.tensors import equal
from . import checks
from .lines import also


@also("cross_entropy", "log_prob")
def classes(call: Any) -> None:
    checks.at_least_one(call, "logits", "class")


@also("log_prob", "linear_log_prob", first=True, shapes=("target", "dlog_prob"))
def targets(call: Any) -> None:
    """Check that the target has the shape of the tokens, or K classes for each of them. The check
    of the line then refuses its dtype."""
    if call.target.dtype not in (torch.int64, torch.int32):
        return
    name = "x" if hasattr(call, "x") else "logits"
    tokens, shape, op = getattr(call, name).shape[:-1], call.target.shape, checks.op(call)
    rows = shape[:-1] if len(shape) > len(tokens) else shape
    if not equal(rows, tokens, f"{op}: target"):
        raise ValueError(
            f"{op}: target must have the shape of {name} but for its last dimension,"
            f" {tuple(tokens)}, or K classes a token beside it, got {tuple(shape)}"
        )
    if len(shape) > len(tokens):
        checks.at_least_one(call, "target", "class")
    if hasattr(call, "dlog_prob"):
        checks.shape(call, "dlog_prob", shape, "target")


@also(
    "cross_entropy", "linear_cross_entropy", "linear_divergence", "linear_score_centering",
    first=True,
)  # fmt: skip
def divisor(call: Any) -> None:
    if call.num_items_in_batch is not None and call.reduction != "mean":
        raise ValueError(
            f"{checks.op(call)}: num_items_in_batch must be None but for the reduction 'mean',"
            f" which divides by it, got one for {call.reduction!r}"
        )


@also("divergence")
def known_statistics(call: Any) -> None:
    checks.at_least_one(call, "student_logits", "class")
    names = tuple(name for name in call._fields if name.startswith("known_"))
    known = checks.given(call, names)
    if not known:
        return
    if len(known) < len(names) or call.kind == "cosine":
        raise ValueError(
            f"{checks.op(call)}: {', '.join(names)} must be given together, and be None for the"
            f" kind 'cosine', got {', '.join(name for name, _ in known)} and the kind {call.kind!r}"
        )
    dtype = checks.wide(call.student_logits, call.teacher_logits)
    for name, tensor in known:
        if tensor.dtype is not dtype:
            raise TypeError(f"{checks.op(call)}: {name} must be {dtype}, got {tensor.dtype}")


@also("router_losses")
def selected_experts(call: Any) -> None:
    checks.at_least_one(call, "x0", "expert")
    if "top_k" in call._fields and call.top_k > call.x0.shape[-1]:
        raise ValueError(
            f"router_losses: top_k must be at most the number of experts, {call.x0.shape[-1]},"
            f" got {call.top_k}"
        )
