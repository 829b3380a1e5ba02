"""divergence of the kind cosine: its kernels of both devices against float64 truth, and its
definition."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import liger_ops
import op_checks
from divergence_cases import COSINE
from liger_ops import library
from linear_divergence_cases import OPS, TwoHeadsCase, tensors
from op_under_test import DEVICE, EVERY_FOLDER, EVERY_IMPLEMENTATION, INF, NAN

EVERY_TILE = pytest.mark.parametrize("tile", (None, (1, 16), (2, 64)))


def test_the_definition_is_torchs_cosine_similarity() -> None:
    """And first and second derivatives are right, with ignored tokens that are NaN."""
    x, y = (torch.randn(2, 3, 7, dtype=torch.double) for _ in range(2))
    target = torch.tensor([[0, 0, -100], [1, -100, 2]])
    ignored = (target == -100).unsqueeze(-1)
    leaves = [z.masked_fill(ignored, NAN).requires_grad_() for z in (x, y)]
    ours = liger_ops.divergence(*leaves, "cosine", temperature=0.7, target=target)
    others = [z.clone().requires_grad_() for z in (x, y)]
    theirs = (1 - F.cosine_similarity(*others, dim=-1)).masked_fill(target == -100, 0.0)
    dy = torch.randn_like(ours)
    grads = [
        torch.autograd.grad(value, tensors, dy)
        for value, tensors in ((ours, leaves), (theirs, others))
    ]
    for a, b in zip((ours, *grads[0]), (theirs, *grads[1]), strict=True):
        torch.testing.assert_close(a, b)

    def divergence(a: Tensor, b: Tensor) -> Tensor:
        return liger_ops.divergence(a, b, "cosine", 0.5, 0.8, 1.3)

    few = [z[0].detach().requires_grad_() for z in (x, y)]
    assert torch.autograd.gradcheck(divergence, few)
    assert torch.autograd.gradgradcheck(divergence, few)


@pytest.mark.device_kernels
@EVERY_IMPLEMENTATION
@EVERY_TILE
def test_rows_of_zeros_and_of_what_is_not_finite(
    implementation: str, tile: tuple[int, int] | None
) -> None:
    """Zeros have the cosine 0 and no gradient; NaN is seen unless the token is ignored."""
    student, teacher = (torch.randn(8, 40, device=DEVICE) for _ in range(2))
    student[0] = teacher[1] = student[2] = teacher[2] = 0
    student[3, 5], teacher[4, 39], student[5, 0] = INF, NAN, 1e30
    student[6] = teacher[7] = NAN
    target = torch.tensor([0] * 6 + [-100] * 2, device=DEVICE)
    case = COSINE.case(shape=(8, 40), dtype=torch.float32, kind="cosine", tile=tile)
    args = (student, teacher, target, *COSINE.options(case))
    definitions = [library.OPS[f"divergence_{name}"].definition for name in ("forward", "backward")]

    def run(backward: bool, args: tuple[object, ...]) -> tuple[Tensor, ...]:
        if implementation == "definition":
            return definitions[backward](*args)
        return op_checks.run_kernel(COSINE, implementation, backward, case, args)

    outputs = run(False, args)
    assert outputs[0][:3].tolist() == [1.0, 1.0, 1.0] and outputs[0][3:6].isnan().all()
    assert all(bool((values[6:] == 0).all()) for values in outputs)
    dy = torch.ones(8, device=DEVICE)
    dy[6:] = INF
    dstudent, dteacher = run(True, (dy, *args[:3], *outputs, *COSINE.options(case), [True, True]))
    assert bool((dstudent[[0, 2, 6, 7]] == 0).all() and (dteacher[[1, 2, 6, 7]] == 0).all())
    assert bool((dstudent[1] == 0).all() and (dteacher[0] == 0).all())
    assert dstudent[3:6].isnan().any(-1).all()


@pytest.mark.device_kernels
@EVERY_IMPLEMENTATION
@pytest.mark.parametrize(("V", "W"), ((11, 11), (11, 14), (14, 11)))
@pytest.mark.parametrize("softcaps", ((None, None), (3.0, 2.0)))
def test_of_two_heads(
    implementation: str, V: int, W: int, softcaps: tuple[float | None, float | None]
) -> None:
    """With labels, and vocabularies of different length, whose missing logits are 0."""
    forward, backward = (library.OPS[f"linear_divergence_{n}"] for n in ("forward", "backward"))
    x, teacher_x = torch.randn(9, 5, device=DEVICE), torch.randn(9, 4, device=DEVICE)
    weight, teacher_weight = torch.randn(V, 5, device=DEVICE), torch.randn(W, 4, device=DEVICE)
    target = torch.randint(11, (9,), device=DEVICE)
    target[3] = -100
    run = forward.kernels.get(implementation, forward.definition)
    arguments = forward.arguments(
        x, weight, teacher_x, teacher_weight, target=target,
        kind="cosine", temperature=2.0, student_softcap=softcaps[0], teacher_softcap=softcaps[1],
        soft_weight=0.3, hard_weight=0.7, chunk_bytes=300,
        gradient_mask=[True, True, False, False, False],
    )  # fmt: skip
    loss, soft, hard, _, dx, dweight, *_ = run(*arguments)
    leaves = [tensor.double().requires_grad_() for tensor in (x, weight)]
    logits = [leaves[0] @ leaves[1].T, teacher_x.double() @ teacher_weight.double().T]
    logits = [
        z if cap is None else cap * torch.tanh(z / cap)
        for z, cap in zip(logits, softcaps, strict=True)
    ]
    student, teacher = (F.pad(z, (0, 14 - z.shape[1])) for z in logits)
    values = (1 - F.cosine_similarity(student, teacher, dim=-1))[target != -100]
    expected_soft, expected_hard = values.mean(), F.cross_entropy(logits[0], target)
    total = 0.3 * expected_soft + 0.7 * expected_hard
    expected = (total, expected_soft, expected_hard)
    for a, b in zip((loss, soft, hard), expected, strict=True):
        torch.testing.assert_close(a, b.float())
    # The forward's gradients are those of the sum.
    for a, b in zip((dx, dweight), torch.autograd.grad(total, leaves), strict=True):
        torch.testing.assert_close(a / len(values), b.float())
    assert backward.kernels.keys() == forward.kernels.keys()


@pytest.mark.device_kernels
@EVERY_FOLDER
@pytest.mark.parametrize(("V", "W"), ((13, 13), (13, 17), (17, 13)))
def test_of_two_heads_by_words(folder: str, V: int, W: int) -> None:
    """The backward of the loss per token, with labels."""
    case = TwoHeadsCase(
        shape=(9,), V=V, W=W, D=5, dtype=torch.float32, kind="cosine", reduction="none",
        hard_weight=0.5, chunk_bytes=200,
    )  # fmt: skip
    args = OPS[0].backward_args(case, tensors(case))
    backward = library.OPS["linear_divergence_backward"]
    truths = backward.definition(*op_checks.widened(args))
    for found, truth in zip(backward.kernels[folder](*args), truths, strict=True):
        assert (found is None) == (truth is None)
        if found is not None:
            torch.testing.assert_close(found.double(), truth, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("beta", (1.0, 0.4))
def test_same_as_liger_kernels_loss(beta: float) -> None:
    """Its beta is a factor of the soft loss, and its mean is over the tokens that count."""
    x, weight = torch.randn(9, 5), torch.randn(11, 5)
    teacher_x, teacher_weight = torch.randn(9, 4), torch.randn(11, 4)
    target = torch.randint(11, (9,))
    distillation = liger_ops.nn.LinearDivergence(
        "cosine", temperature=2.0, soft_weight=0.6 * beta, hard_weight=0.4
    )
    loss, *_ = distillation(x, weight, teacher_x, teacher_weight, target=target)
    student, teacher = x @ weight.T, teacher_x @ teacher_weight.T
    normal = [F.normalize(z / 2.0, dim=-1) for z in (student, teacher)]
    soft = beta * (1 - F.cosine_similarity(*normal, dim=-1)).mean()
    torch.testing.assert_close(loss, 0.4 * F.cross_entropy(student, target) + 0.6 * soft)


def test_the_module() -> None:
    x, y = torch.randn(3, 7), torch.randn(3, 7)
    found = liger_ops.nn.Divergence("cosine")(x, y)
    torch.testing.assert_close(found, 1 - F.cosine_similarity(x, y))
