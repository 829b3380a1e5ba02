"""divergence_forward and its backward of parts of the classes, with what is known of all."""

from __future__ import annotations

import pytest
import torch

import liger_ops
import op_checks
from liger_ops.ops.losses.divergence import DISTRIBUTION_KINDS, KINDS
from op_table import OPS
from op_under_test import DEVICE, EVERY_FOLDER

OP = OPS["divergence_forward-jsd"]
# The last part is wider than a tile; in the second, both have no class of a probability above 0.
PARTS = ((0, 5), (5, 8), (8, 150))


@pytest.mark.device_kernels
@EVERY_FOLDER
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tile", (None, (1, 16)))
def test_the_parts_add_up_to_the_whole(
    folder: str, kind: str, tile: tuple[int, int] | None
) -> None:
    generator = torch.Generator().manual_seed(0)
    student, teacher = (torch.randn(3, 150, generator=generator).to(DEVICE) for _ in range(2))
    student[:, 5:8] = teacher[:, 5:8] = -float("inf") if kind != "cosine" else 0.0
    target = torch.tensor([0, -100, 2], device=DEVICE)
    case = OP.case(
        shape=(3, 150), dtype=torch.float32, kind=kind, beta=0.3,
        temperature=0.8, teacher_temperature=1.3, tile=tile,
    )  # fmt: skip
    leaves = [x.double().requires_grad_() for x in (student, teacher)]
    truth = liger_ops.divergence_forward(*leaves, target, *OP.options(case))
    dy = torch.tensor([1.0, 2.0, 3.0], device=DEVICE)
    dtruth = torch.autograd.grad(truth[0], leaves, dy.double())
    known = [result.detach().float() for result in truth]
    total = torch.zeros(2, 3, device=DEVICE)
    for first, end in PARTS:
        part = (student[:, first:end], teacher[:, first:end], target)
        if kind in DISTRIBUTION_KINDS:
            args = (*part, *OP.options(case), *known[2:])
            results = op_checks.run_kernel(OP, folder, False, case, args)
            total += torch.stack(results[:2])
            torch.testing.assert_close(results[2:], tuple(known[2:]), rtol=0, atol=0)
        back = (dy, *part, *known, *OP.options(case), [True, True])
        for found, whole in zip(
            op_checks.run_kernel(OP, folder, True, case, back), dtruth, strict=True
        ):
            torch.testing.assert_close(found, whole[:, first:end].float(), rtol=1e-5, atol=1e-6)
    if kind in DISTRIBUTION_KINDS:
        torch.testing.assert_close(total, torch.stack(known[:2]), rtol=1e-5, atol=1e-6)


def test_the_definition_takes_what_is_known() -> None:
    """The definition takes known statistics of parts, in float64, but no gradients of these."""
    student, teacher = (torch.randn(2, 6, dtype=torch.float64) for _ in range(2))
    whole = liger_ops.divergence_forward(student, teacher, kind="jsd")
    names = ("student_lse", "teacher_lse", "student_lse_error", "teacher_lse_error")
    given = {f"known_{name}": known for name, known in zip(names, whole[2:], strict=True)}
    parts = [
        liger_ops.divergence_forward(student[:, own], teacher[:, own], kind="jsd", **given)[0]
        for own in (slice(0, 2), slice(2, 6))
    ]
    torch.testing.assert_close(sum(parts), whole[0])
    with pytest.raises(ValueError, match="no argument may require a gradient"):
        liger_ops.divergence_forward(student.requires_grad_(), teacher, kind="jsd", **given)
    given["known_teacher_lse"] = None
    with pytest.raises(ValueError, match="must be given together"):
        liger_ops.divergence_forward(student, teacher, **given)
    given["known_teacher_lse"] = whole[3].float()
    with pytest.raises(TypeError, match=r"known_teacher_lse must be torch\.float64"):
        liger_ops.divergence_forward(student, teacher, **given)
