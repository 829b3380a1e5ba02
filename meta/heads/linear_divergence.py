"""linear_divergence: checks and outputs."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ... import library
from ...ops.heads.linear_divergence import STATISTICS
from ...ops.heads.two_heads import result_dtype
from .. import checks
from ..losses.cross_entropy import check_reduction, check_target
from ..losses.divergence import check_kind
from .linear_cross_entropy import (
    check_chunks,
    check_computed,
    check_layer,
    check_lora,
    check_mask,
    forward_gradients,
)

# The tensors of the student's head, in the order of masks and gradients.
HEAD = ("student_x", "student_weight", "student_bias", "student_lora_x", "student_lora_b")


@library.fake("linear_divergence_forward")
def linear_divergence_forward(call: Any) -> tuple[Tensor | None, ...]:
    x = call.student_x
    _check(call, "gradient_mask")
    dtype = result_dtype(x, call.teacher_x, call.teacher_logits)
    tokens = x.shape[:-1]
    shape = tokens if call.reduction == "none" else ()
    return (
        x.new_empty(shape, dtype=dtype),
        x.new_empty(shape, dtype=dtype),
        None if call.target is None else x.new_empty(shape, dtype=dtype),
        x.new_empty((STATISTICS, *tokens), dtype=dtype),
        *forward_gradients(call, HEAD),
        x.new_empty(tokens, dtype=dtype) if call.return_entropy else None,
    )


@library.fake("linear_divergence_backward")
def linear_divergence_backward(call: Any) -> tuple[Tensor | None, ...]:
    _check(call, "output_mask")
    tokens = call.student_x.shape[:-1]
    grads = ("dloss", "ddivergence", "dcross_entropy")
    checks.floating(call, *grads, "statistics")
    checks.same_device(call, "student_x", *grads, "statistics")
    for name in grads:
        expected = tokens if call.reduction == "none" else ()
        checks.shape(call, name, expected, f"the loss, reduced by {call.reduction!r}")
    checks.shape(call, "statistics", (STATISTICS, *tokens), "the forward's")
    check_computed(call, HEAD)
    return checks.gradients(call, *HEAD)


def _check(call: Any, mask: str) -> None:
    op = checks.op(call)
    check_layer(call, "student_")
    check_lora(call, "student_")
    _check_teacher(call)
    if call.target is not None:
        check_target(call, "student_x")
    checks.floating(call, "token_weight")
    checks.same_device(call, "student_x", "token_weight")
    tokens = call.student_x.shape[:-1]
    checks.shape(call, "token_weight", tokens, "student_x but for its last dimension")
    check_reduction(call, "student_x")
    check_kind(call)
    checks.positive(
        call, "student_softcap", "teacher_softcap", "student_logit_scale", "teacher_logit_scale"
    )
    for name in ("soft_weight", "hard_weight"):
        value = getattr(call, name)
        if not 0 <= value < float("inf"):
            raise ValueError(f"{op}: {name} must be a number of at least 0, got {value}")
    if call.hard_weight != 0 and call.target is None:
        raise ValueError(f"{op}: hard_weight must be 0 without a target, got {call.hard_weight}")
    check_chunks(call, call.student_weight)
    check_mask(call, mask, HEAD)


def _check_teacher(call: Any) -> None:
    op, tokens = checks.op(call), call.student_x.shape[:-1]
    layer = [name for name, _ in checks.given(call, ("teacher_x", "teacher_weight"))]
    if call.teacher_logits is not None:
        names = ("x", "weight", "bias", "lora_x", "lora_b")
        others = checks.given(call, [f"teacher_{name}" for name in names])
        if others:
            raise ValueError(
                f"{op}: the teacher must be given by teacher_logits or by teacher_x and"
                f" teacher_weight, not both, got {others[0][0]} beside teacher_logits"
            )
        name = "teacher_logits"
        checks.floating(call, name)
        checks.at_least_dims(call, name, 1, "(..., W)")
        if call.teacher_logits.shape[-1] < 1:
            raise ValueError(
                f"{op}: teacher_logits must have at least one class, got"
                f" {tuple(call.teacher_logits.shape)}"
            )
    elif len(layer) < 2:
        raise ValueError(
            f"{op}: the teacher must be given by teacher_logits or by teacher_x and"
            f" teacher_weight, got {layer[0] if layer else 'none of these'}"
        )
    else:
        check_layer(call, "teacher_")
        check_lora(call, "teacher_")
        name = "teacher_x"
    checks.same_device(call, "student_x", name)
    teacher = getattr(call, name)
    form = (*tokens, teacher.shape[-1])
    checks.shape(call, name, form, "student_x but for its last dimension")
