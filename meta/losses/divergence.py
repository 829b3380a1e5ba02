"""divergence: checks and outputs."""

from __future__ import annotations

from typing import Any

from ...ops.losses.divergence import KINDS
from .. import checks
from ..lines import also


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


def check_kind(call: Any) -> None:
    checks.choice(call, "kind", KINDS)
    checks.beta(call)
    checks.positive(call, "temperature", "teacher_temperature")
