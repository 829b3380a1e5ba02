"""Losses: the number of classes, the divisor of a mean, the known statistics of a divergence, and
the number of experts that a router selects.
"""

from __future__ import annotations

from typing import Any

from . import checks
from .lines import also


@also("cross_entropy", "log_prob")
def classes(call: Any) -> None:
    checks.at_least_one(call, "logits", "class")


@also("cross_entropy", "linear_cross_entropy", "linear_divergence", first=True)
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
