"""divergence's kernels of both devices against float64 truth, and its composed op."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from torch import Tensor

import liger_ops
import op_checks
import strategies
from op_table import OPS
from op_under_test import DEVICE, EVERY_FOLDER, INF, NAN

OP = OPS["divergence_forward-jsd"]
EVERY_KIND = pytest.mark.parametrize("kind", ("jsd", "forward_kl", "reverse_kl", "tvd"))


def written(student: Tensor, teacher: Tensor, kind: str, beta: float) -> Tensor:
    """Compute a divergence of log-probabilities as trainers write it."""
    kl = lambda log_m, log_p: torch.nn.functional.kl_div(
        log_m, log_p, reduction="none", log_target=True
    ).sum(-1)
    if kind == "tvd":
        return (student.exp() - teacher.exp()).abs().sum(-1) / 2
    if kind == "forward_kl" or (kind == "jsd" and beta == 0):
        return kl(student, teacher)
    if kind == "reverse_kl" or (kind == "jsd" and beta == 1):
        return kl(teacher, student)
    log_m = torch.log(beta * teacher.exp() + (1 - beta) * student.exp())
    return beta * kl(log_m, teacher) + (1 - beta) * kl(log_m, student)


@given(case=strategies.cases(OP))
def test_the_definition_is_what_trainers_write(case: Any) -> None:
    tensors = OP.tensors(case)
    leaves = [tensors[f"{of}_logits"].double().requires_grad_() for of in ("student", "teacher")]
    *options, ignore_index = OP.options(case)
    target = tensors["target"]
    ours = liger_ops.divergence(*leaves, *options, target, ignore_index)
    temperatures = (case.temperature, case.teacher_temperature or case.temperature)
    log_p = [(x / t).log_softmax(-1) for x, t in zip(leaves, temperatures, strict=True)]
    theirs = written(*log_p, case.kind, case.beta)
    if target is not None:
        theirs = theirs.masked_fill(target == ignore_index, 0.0)
    weight = torch.randn_like(ours)
    grads = [torch.autograd.grad(values, leaves, weight) for values in (ours, theirs)]
    for a, b in zip((ours, *grads[0]), (theirs, *grads[1]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-9)


# p and q of four rows: the teacher lacks a class, the student does, both do, and they are disjoint.
LOGITS = (
    [[0.5, 1.0, 0.0], [0.5, 1.0, -INF], [0.5, 1.0, -INF], [1.0, -INF, -INF]],
    [[0.5, 2.0, -INF], [0.5, 2.0, 0.0], [0.5, 2.0, -INF], [-INF, 1.0, 0.0]],
)
# Which of the rows are infinite.
INFINITE = {"forward_kl": [1, 3], "reverse_kl": [0, 3]}


@pytest.mark.device_kernels
@EVERY_FOLDER
@EVERY_KIND
@pytest.mark.parametrize("tile", (None, (1, 16)))
def test_classes_of_probability_zero(folder: str, kind: str, tile: tuple[int, int] | None) -> None:
    """A result is inf or finite as the formula says, and a finite one has a finite gradient."""
    student, teacher = (
        torch.nn.functional.pad(torch.tensor(x), (0, 30), value=-INF).to(DEVICE) for x in LOGITS
    )
    case = OP.case(shape=(4, 33), dtype=torch.float32, kind=kind, tile=tile)
    args = (student, teacher, None, *OP.options(case))
    outputs = op_checks.run_kernel(OP, folder, False, case, args)
    value = outputs[0]
    infinite = INFINITE.get(kind, [])
    finite = [row for row in range(4) if row not in infinite]
    assert bool((value[infinite] == INF).all())
    leaves = [x[finite].double().requires_grad_() for x in (student, teacher)]
    truth = liger_ops.divergence(*leaves, kind)
    torch.testing.assert_close(value[finite], truth.float())
    if kind in ("jsd", "tvd"):
        assert value[3].item() == pytest.approx(1.0 if kind == "tvd" else 0.6931472)
    back = (torch.ones_like(value), *args[:3], *outputs, *OP.options(case), [True, True])
    found = op_checks.run_kernel(OP, folder, True, case, back)
    for a, b in zip(found, torch.autograd.grad(truth.sum(), leaves), strict=True):
        assert b.isfinite().all()
        torch.testing.assert_close(a[finite], b.float())
    if infinite:
        # The gradient of the side whose probabilities are only in logarithms, q - p or p - q.
        side = kind == "reverse_kl"
        p, q = teacher.softmax(-1), student.softmax(-1)
        torch.testing.assert_close(found[side], p - q if side else q - p)


@pytest.mark.device_kernels
@EVERY_FOLDER
@EVERY_KIND
@pytest.mark.parametrize("tile", (None, (1, 16)))
def test_nan_is_seen_unless_ignored(folder: str, kind: str, tile: tuple[int, int] | None) -> None:
    student, teacher = (torch.randn(7, 40, device=DEVICE) for _ in range(2))
    student[0, 39] = teacher[1, 3] = student[5] = teacher[6, 2] = NAN
    student[2] = teacher[3] = -INF
    student[4, 0] = INF
    target = torch.tensor([0, 0, 0, 0, 0, -100, -100], device=DEVICE)
    case = OP.case(shape=(7, 40), dtype=torch.float32, kind=kind, tile=tile)
    args = (student, teacher, target, *OP.options(case))
    outputs = op_checks.run_kernel(OP, folder, False, case, args)
    assert outputs[0][:5].isnan().all()
    assert all(bool((values[5:] == 0).all()) for values in outputs)
    dy = torch.full((7,), INF, device=DEVICE)
    back = (dy, *args[:3], *outputs, *OP.options(case), [True, True])
    for gradient in op_checks.run_kernel(OP, folder, True, case, back):
        assert bool((gradient[5:] == 0).all()) and gradient[:5].isnan().any(-1).all()
