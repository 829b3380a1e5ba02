"""The LoRAs of linear_divergence's two heads. test_head_lora.py has the composed op."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import liger_ops
from head_bounds import assert_no_further
from head_calls import Calls
from liger_ops import library
from linear_divergence_bounds import Bounds, side_by_side, upstream
from linear_divergence_cases import HEAD, OPS, TwoHeadsCase
from linear_divergence_cases import tensors as tensors_of
from op_checks import assert_own_memory, assert_unchanged, clones, poisoned_memory, widened
from op_under_test import FOLDERS, X_LAYOUTS, Tensors

FORWARD, BACKWARD = (library.OPS[f"linear_divergence_{name}"] for name in ("forward", "backward"))
EVERY_FOLDER = pytest.mark.parametrize("folder", FOLDERS)
MOSTLY = st.sampled_from((True, True, True, False))


@st.composite
def cases(draw: st.DrawFn) -> TwoHeadsCase:
    """Mostly of several chunks, with all gradients."""
    bias, has_target = draw(st.booleans()), draw(MOSTLY)
    mask = [draw(MOSTLY) for _ in range(5)]
    mask[2] = mask[2] and bias
    return TwoHeadsCase(
        shape=draw(st.sampled_from(((9,), (2, 3), (3, 1, 2), (1,), (), (0,)))),
        D=draw(st.sampled_from((7, 16, 1))),
        V=draw(st.sampled_from((7, 16, 33, 1))),
        W=draw(st.sampled_from((7, 16, 33, 1))),
        rank=draw(st.sampled_from((3, 8, 1))),
        teacher_rank=draw(st.sampled_from((None, 2))),
        dtype=draw(st.sampled_from((torch.float32, torch.bfloat16, torch.float16))),
        layout=draw(st.sampled_from(X_LAYOUTS)),
        bias=bias,
        by_logits=draw(st.sampled_from((False, False, True))),
        has_target=has_target,
        reduction=draw(st.sampled_from(("sum", "none"))),
        kind=draw(st.sampled_from(("jsd", "tvd"))),
        temperature=draw(st.sampled_from((1.0, 0.6))),
        hard_weight=0.5 if has_target else 0.0,
        accumulate_narrow=draw(st.booleans()),
        chunk_bytes=draw(st.sampled_from((60, 400, 1, None))),
        scale=draw(st.sampled_from((1.0, 0.05))),
        mask=tuple(mask),
        seed=draw(st.integers(0, 2**31)),
    )


def results(
    where: str, case: TwoHeadsCase, tensors: Tensors
) -> tuple[tuple[Tensor | None, ...], tuple[Tensor | None, ...]]:
    """The losses and statistics, and the gradients: those that the forward computes for the
    reduction "sum", and the backward's for "none"."""
    forward, backward = (
        op.definition if where == "definition" else op.kernels[where] for op in (FORWARD, BACKWARD)
    )
    outputs = forward(*OPS[0].forward_args(case, tensors))
    if case.reduction == "sum":
        return outputs[:4], outputs[4:9]
    return outputs[:4], backward(*OPS[0].backward_args(case, tensors))


@pytest.mark.device_kernels
@EVERY_FOLDER
@settings(max_examples=settings().max_examples // 2)
@given(case=cases())
def test_kernels_match_the_heads_side_by_side(folder: str, case: TwoHeadsCase) -> None:
    tensors = tensors_of(case)
    given = tuple(value for value in tensors.values() if value is not None)
    before = clones(given)
    with poisoned_memory():
        found, gradients = results(folder, case, tensors)
    assert_unchanged(given, before)
    assert_own_memory(given, (*found, *gradients))
    own, own_gradients = results("definition", case, tensors)
    together, wide = side_by_side(case, tensors)
    bounds = Bounds(together, wide, roundings=2)
    mask = (True, True, case.bias, False, False)
    exact = replace(together, accumulate_narrow=False, mask=mask)
    in_float64 = {name: widened((value,))[0] for name, value in wide.items()}
    truths, (dx, dweight, dbias, *_) = results("definition", exact, in_float64)
    label = f"{folder} {case}"
    divergence, loss, statistics = bounds.outputs()
    weight = 1 if case.reduction == "none" else math.prod(case.shape)
    errors = (weight * (divergence + loss), weight * divergence, weight * loss, statistics)
    for output, reference, truth, error in zip(found, own, truths, errors, strict=True):
        assert (output is None) == (reference is None), label
        if output is not None:
            assert_no_further(label, output, reference, truth, error + 1e-12)
    D = case.D
    expected = (dx[..., :D], dweight[:, :D], dbias, dx[..., D:], dweight[:, D:])
    errors = bounds.gradients(*upstream(case, tensors, case.reduction == "sum"))
    for name, wanted, output, reference, truth, error in zip(
        HEAD, case.mask, gradients, own_gradients, expected, (*errors, *errors[:2]), strict=True
    ):
        assert (output is not None) == wanted, label
        if wanted:
            error += torch.finfo(case.dtype).tiny
            assert_no_further(f"d{name}, {label}", output, reference, truth, error)


@pytest.mark.device_kernels
@pytest.mark.parametrize("implementation", ("definition", *FOLDERS))
@pytest.mark.parametrize("reduction", ("sum", "none"))
def test_no_gradient_of_a_frozen_weight(implementation: str, reduction: str) -> None:
    """Neither it, nor the adapted weights, nor the logits are ever whole in memory."""
    case = TwoHeadsCase(
        shape=(16,), V=64, W=64, D=16, E=16, rank=2, teacher_rank=2, reduction=reduction,
        bias=False, chunk_bytes=2 * 2 * 64 * 4, mask=(True, False, False, True, True),
    )  # fmt: skip
    tensors = tensors_of(case)
    with Calls() as calls:
        _, gradients = results(implementation, case, tensors)
    assert [gradient is not None for gradient in gradients] == list(case.mask)
    # The definition has int64 tensors of a chunk, and the results have the size of x.
    assert 2 * 64 * 4 <= calls.largest <= 2 * 64 * 8


def test_rejects() -> None:
    x, weight, logits = torch.zeros(2, 3), torch.zeros(5, 3), torch.zeros(2, 5)
    a, b = torch.zeros(4, 3), torch.zeros(5, 4)
    layer = {"teacher_x": x, "teacher_weight": weight}
    for options, message in (
        ({"student_lora_a": a}, "student_lora_b must be given with student_lora_a, got None"),
        ({"student_lora_b": b}, "student_lora_a must be given with student_lora_b, got None"),
        ({"teacher_lora_a": a}, "teacher_lora_b must be given with teacher_lora_a, got None"),
        (
            {"student_lora_a": a[:, :2], "student_lora_b": b},
            "student_lora_a must be (R, D) with D of student_x, (4, 3), got (4, 2)",
        ),
        (
            {"teacher_lora_a": a, "teacher_lora_b": b[:3]},
            "teacher_lora_b must be (V, R) with V of teacher_weight and R of teacher_lora_a",
        ),
    ):
        with pytest.raises(ValueError) as raised:
            liger_ops.linear_divergence(x, weight, **layer, **options)
        assert str(raised.value).startswith(f"linear_divergence: {message}")
    with pytest.raises(ValueError, match="must be None without teacher_x and teacher_weight"):
        liger_ops.linear_divergence(x, weight, teacher_logits=logits, teacher_lora_a=a)
    lora_x = torch.zeros(2, 4)
    for options, message in (
        ({"student_lora_x": lora_x}, "student_lora_b must be given with student_lora_x, got None"),
        (
            {"student_lora_x": lora_x[:1], "student_lora_b": b},
            "student_lora_x must have the shape of student_x but for its last dimension",
        ),
        (
            {"teacher_lora_x": lora_x, "teacher_lora_b": b[:, :2]},
            "teacher_lora_b must have the shape of teacher_weight but for its last dimension",
        ),
        (
            {"gradient_mask": [True, True, False, True, False]},
            "gradient_mask[3] must be False without a student_lora_x",
        ),
    ):
        with pytest.raises(ValueError) as raised:
            liger_ops.linear_divergence_forward(x, weight, **layer, **options)
        assert str(raised.value).startswith(f"linear_divergence: {message}")
    with pytest.raises(ValueError, match="got teacher_lora_x beside teacher_logits"):
        liger_ops.linear_divergence_forward(
            x, weight, teacher_logits=logits, teacher_lora_x=lora_x, teacher_lora_b=b
        )


@pytest.mark.parametrize("name", ("teacher_lora_a", "teacher_lora_b"))
def test_the_teachers_lora_is_a_constant(name: str) -> None:
    x, weight = torch.zeros(2, 3), torch.zeros(5, 3)
    given = {"teacher_x": x, "teacher_weight": weight}
    given |= {"teacher_lora_a": torch.zeros(4, 3), "teacher_lora_b": torch.zeros(5, 4)}
    given[name].requires_grad_()
    with pytest.raises(ValueError, match=f"linear_divergence: {name} must not require a gradient"):
        liger_ops.linear_divergence(x, weight, **given)
    with torch.no_grad():
        liger_ops.linear_divergence(x, weight, **given)
