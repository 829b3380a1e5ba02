"""linear_divergence: checks and outputs."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .. import library
from ..ops.head import forward_dweight_dtype, forward_gradient_dtype
from ..ops.linear_divergence import STATISTICS
from ..ops.two_heads import result_dtype
from . import checks
from .cross_entropy import check_reduction, check_target
from .divergence import check_kind
from .linear_cross_entropy import check_chunks, check_layer


@library.fake("linear_divergence_forward")
def linear_divergence_forward(call: Any) -> tuple[Tensor | None, ...]:
    x, weight, mask = call.student_x, call.student_weight, call.gradient_mask
    _check(call, "gradient_mask")
    if call.reduction == "none" and any(mask):
        raise ValueError(
            f"{checks.op(call)}: gradient_mask must be all False for the reduction 'none', whose"
            f" gradient the backward computes, got {list(mask)}"
        )
    dtype = result_dtype(x, call.teacher_x, call.teacher_logits)
    tokens = x.shape[:-1]
    shape = tokens if call.reduction == "none" else ()
    return (
        x.new_empty(shape, dtype=dtype),
        x.new_empty(shape, dtype=dtype),
        None if call.target is None else x.new_empty(shape, dtype=dtype),
        x.new_empty((STATISTICS, *tokens), dtype=dtype),
        checks.like(x, forward_gradient_dtype(weight)) if mask[0] else None,
        checks.like(weight, forward_dweight_dtype(weight, call.accum_dtype)) if mask[1] else None,
        checks.like(call.student_bias, forward_gradient_dtype(weight)) if mask[2] else None,
    )


@library.fake("linear_divergence_backward")
def linear_divergence_backward(call: Any) -> tuple[Tensor | None, ...]:
    _check(call, "output_mask")
    tokens = call.student_x.shape[:-1]
    grads, computed = ("dloss", "ddivergence", "dcross_entropy"), ("dx", "dweight", "dbias")
    checks.floating(call, *grads, "statistics", *computed)
    checks.same_device(call, "student_x", *grads, "statistics", *computed)
    for name in grads:
        expected = tokens if call.reduction == "none" else ()
        checks.shape(call, name, expected, f"the loss, reduced by {call.reduction!r}")
    checks.shape(call, "statistics", (STATISTICS, *tokens), "the forward's")
    checks.shape(call, "dx", call.student_x.shape, "student_x")
    checks.shape(call, "dweight", call.student_weight.shape, "student_weight")
    checks.shape(call, "dbias", call.student_weight.shape[:1], "student_weight's rows")
    return checks.gradients(call, "student_x", "student_weight", "student_bias")


def _check(call: Any, mask: str) -> None:
    op = checks.op(call)
    check_layer(call, "student_")
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
    if getattr(call, mask)[2] and call.student_bias is None:
        raise ValueError(
            f"{op}: {mask}[2] must be False without a student_bias, got {list(getattr(call, mask))}"
        )


def _check_teacher(call: Any) -> None:
    op, tokens = checks.op(call), call.student_x.shape[:-1]
    layer = [name for name, _ in checks.given(call, ("teacher_x", "teacher_weight"))]
    if call.teacher_logits is not None:
        others = checks.given(call, ("teacher_x", "teacher_weight", "teacher_bias"))
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
        name = "teacher_x"
    checks.same_device(call, "student_x", name)
    teacher = getattr(call, name)
    form = (*tokens, teacher.shape[-1])
    checks.shape(call, name, form, "student_x but for its last dimension")
