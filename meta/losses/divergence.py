"""divergence: checks and outputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ... import library
from ...ops.losses.divergence import KINDS, RESULTS
from .. import checks
from .cross_entropy import check_target


@library.fake("divergence_forward")
def divergence_forward(call: Any) -> tuple[Tensor, ...]:
    _check(call)
    x = call.student_logits
    double = torch.float64 in (x.dtype, call.teacher_logits.dtype)
    dtype = torch.float64 if double else torch.float32
    _check_known(call, dtype)
    return tuple(x.new_empty(x.shape[:-1], dtype=dtype) for _ in RESULTS.split())


@library.fake("divergence_backward")
def divergence_backward(call: Any) -> tuple[Tensor | None, ...]:
    _check(call)
    names = ("ddivergence", *RESULTS.split())
    checks.floating(call, *names)
    checks.same_device(call, "student_logits", *names)
    for name in names:
        checks.shape(call, name, call.student_logits.shape[:-1], "student_logits but for its last")
    return checks.gradients(call, "student_logits", "teacher_logits")


def _check(call: Any) -> None:
    checks.floating(call, "student_logits")
    checks.at_least_dims(call, "student_logits", 1, "(..., V)")
    shape = tuple(call.student_logits.shape)
    if shape[-1] < 1:
        raise ValueError(
            f"{checks.op(call)}: student_logits must have at least one class, got {shape}"
        )
    checks.same_form(call, "student_logits", "teacher_logits")
    if call.target is not None:
        check_target(call, "student_logits")
    check_kind(call)


def _check_known(call: Any, dtype: torch.dtype) -> None:
    names = tuple(name for name in call._fields if name.startswith("known_"))
    known = checks.given(call, names)
    if not known:
        return
    if len(known) < len(names) or call.kind == "cosine":
        raise ValueError(
            f"{checks.op(call)}: {', '.join(names)} must be given together, and be None for the"
            f" kind 'cosine', got {', '.join(name for name, _ in known)} and the kind {call.kind!r}"
        )
    checks.same_device(call, "student_logits", *names)
    for name, tensor in known:
        if tensor.dtype is not dtype:
            raise TypeError(f"{checks.op(call)}: {name} must be {dtype}, got {tensor.dtype}")
        checks.shape(call, name, call.student_logits.shape[:-1], "student_logits but for its last")


def check_kind(call: Any) -> None:
    checks.choice(call, "kind", KINDS)
    checks.beta(call)
    checks.positive(call, "temperature", "teacher_temperature")
