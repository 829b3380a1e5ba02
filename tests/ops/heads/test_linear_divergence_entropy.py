"""The student's entropy, which linear_divergence_forward returns on request."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import liger_ops
from head_bounds import assert_no_further
from liger_ops import library
from linear_divergence_bounds import logits_of
from linear_divergence_cases import OPS, TwoHeadsCase, tensors
from op_under_test import EVERY_FOLDER, X_LAYOUTS, max_abs

FORWARD = library.OPS["linear_divergence_forward"]


@st.composite
def cases(draw: st.DrawFn) -> TwoHeadsCase:
    has_target = draw(st.booleans())
    return TwoHeadsCase(
        shape=draw(st.sampled_from(((5,), (2, 3), (1,), (), (0,)))),
        V=draw(st.sampled_from((7, 33, 130, 1))),
        W=draw(st.sampled_from((7, 33))),
        dtype=draw(st.sampled_from((torch.float32, torch.bfloat16, torch.float16))),
        teacher_dtype=draw(st.sampled_from((None, torch.float32))),
        layout=draw(st.sampled_from(X_LAYOUTS)),
        by_logits=draw(st.booleans()),
        has_target=has_target,
        hard_weight=0.5 if has_target else 0.0,
        reduction=draw(st.sampled_from(("sum", "none"))),
        kind="tvd",
        temperature=draw(st.sampled_from((1.0, 0.6))),
        teacher_temperature=0.7,
        softcap=draw(st.sampled_from((None, 5.0))),
        logit_scale=draw(st.sampled_from((1.0, 0.25))),
        chunk_bytes=draw(st.sampled_from((60, 400, None))),
        scale=draw(st.sampled_from((1.0, 4.0))),
        return_entropy=True,
        seed=draw(st.integers(0, 2**31)),
    )


@pytest.mark.device_kernels
@EVERY_FOLDER
@settings(max_examples=settings().max_examples // 2)
@given(case=cases())
def test_matches_truth_and_changes_nothing_else(folder: str, case: TwoHeadsCase) -> None:
    given = tensors(case)
    *others, found = FORWARD.kernels[folder](*OPS[0].forward_args(case, given))
    reference = FORWARD.definition(*OPS[0].forward_args(case, given))[-1]
    z, _ = logits_of(case, given)
    log_q = (z / case.temperature).log_softmax(-1)
    truth = -(log_q.exp() * log_q).sum(-1)
    if case.has_target:
        truth = torch.where(given["target"] == -100, 0.0, truth)
    eps, eps32 = torch.finfo(case.dtype).eps, torch.finfo(torch.float32).eps
    size = max_abs(z) + (case.softcap or 0) + math.log(case.V)
    error = 2 * (eps + 16 * eps32) * size / case.temperature * (1 + math.log(case.V))
    assert_no_further(f"{folder} {case}", found, reference, truth, error)
    args = OPS[0].forward_args(replace(case, return_entropy=False), given)
    without = FORWARD.kernels[folder](*args)
    assert without[-1] is None
    for a, b in zip(others, without, strict=False):
        assert (a is None and b is None) or torch.equal(a.nan_to_num(), b.nan_to_num())


def test_has_no_gradient() -> None:
    x, weight = torch.randn(6, 8, requires_grad=True), torch.randn(5, 8, requires_grad=True)
    teacher = torch.randn(6, 5)
    given = {"teacher_logits": teacher, "target": torch.tensor([0, -100, 1, 2, 3, 4])}
    loss, *_, entropy = liger_ops.linear_divergence_forward(
        x, weight, **given, temperature=0.5, return_entropy=True
    )
    assert loss.requires_grad and not entropy.requires_grad
    expected = torch.distributions.Categorical(logits=F.linear(x, weight) / 0.5).entropy()
    torch.testing.assert_close(entropy, expected.detach() * (given["target"] != -100))
    torch.autograd.grad(loss, (x, weight))
