"""Checks of kl_div, jsd and tvd, which launch the same kernels: each takes the op's name."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import liger_ops
import op_checks
from distribution_cases import names, options, written
from op_table import OPS
from op_under_test import DEVICE


def assert_is_what_trainers_write(case: Any) -> None:
    """Check the op in float64 against the code of trainers: values, and gradients of the tokens."""
    op = OPS[case.op]
    tensors = op.tensors(case)
    two = [tensors[name].double().reshape(-1, case.shape[-1]) for name in names(case.op)[:2]]
    leaves = [x.detach().requires_grad_() for x in two]
    labels = tensors.get("shift_labels")
    labels = None if labels is None else labels.reshape(-1)
    inputs = leaves if case.op == "kl_div" else [*leaves, labels]
    ours = getattr(liger_ops, case.op)(*inputs, *options(case))
    theirs = written(case, *leaves, labels)
    weight = torch.randn_like(ours)
    grads = [torch.autograd.grad(loss, leaves, weight) for loss in (ours, theirs)]
    for a, b in zip((ours, *grads[0]), (theirs, *grads[1]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def run(
    folder: str, case: Any, *tensors: Tensor | None, dloss: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Run a device's kernels; return the loss and both gradients."""
    op = OPS[case.op]
    args = (*tensors, *options(case))
    (loss,) = op_checks.run_kernel(op, folder, False, case, args)
    dloss = torch.ones_like(loss) if dloss is None else dloss
    back = (dloss, *args, [True, True])
    dx, dy = op_checks.run_kernel(op, folder, True, case, back)
    return loss, dx, dy


def assert_ignored_rows_are_not_seen(folder: str, op: str, reduction: str) -> None:
    """Check that NaN in ignored rows changes nothing, and that their gradients are 0.

    With every row ignored, the loss is 0, and has a gradient.
    """
    case = OPS[op].sample(torch.float32, reduction=reduction, tile=(2, 16))
    first, second = (torch.rand(5, 40, device=DEVICE).log_softmax(-1) for _ in range(2))
    kept = torch.tensor([0, 2, 3], device=DEVICE)
    alone = run(folder, case, first[kept], second[kept], None)
    labels = torch.tensor([4, -100, 0, 7, -100], device=DEVICE)
    first[1], second[4] = float("nan"), float("nan")
    second[1, 3], first[4, 5] = float("inf"), -float("inf")
    infinite = torch.full((5, 40) if alone[0].dim() else (), float("inf"), device=DEVICE)
    for gradient in run(folder, case, first, second, labels, dloss=infinite)[1:]:
        assert bool((gradient[[1, 4]] == 0).all())
    results = run(folder, case, first, second, labels)
    for values, expected in zip(results, alone, strict=True):
        kept_values = values[kept] if values.dim() else values
        torch.testing.assert_close(kept_values, expected, rtol=1e-6, atol=1e-9)
        assert not values.dim() or bool((values[[1, 4]] == 0).all())
    for values in run(folder, case, first, second, torch.full_like(labels, -100)):
        assert bool((values == 0).all())
    leaf = first.clone().requires_grad_()
    loss = getattr(liger_ops, op)(leaf, second, torch.full_like(labels, -100), *options(case))
    loss.sum().backward()
    assert bool((loss == 0).all()) and bool((leaf.grad == 0).all())
