"""kl_div, jsd and tvd under test. A case's shape is that of both distributions."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cross_entropy_cases import TARGETS, targets
from launch_forms import FP32, Fields, loss_forms
from liger_ops.lowering.common.losses.distribution_loss import FORMS
from liger_ops.ops.losses.distribution_loss import DistributionLoss
from op_under_test import INF, SAME, X_LAYOUTS, Magnitude, OpUnderTest, Tensors, drawn_for, laid_out


def kind(case: Any) -> str:
    """Return the divergence that the op computes for a case's options."""
    if case.op == "kl_div":
        return "forward_kl" if case.log_target else "kl_div"
    return {0.0: "forward_kl", 1.0: "reverse_kl"}.get(case.beta, "jsd")


def options(case: Any) -> tuple[Any, ...]:
    """Return the arguments of the op behind its tensors."""
    return {
        "kl_div": (case.reduction, case.log_target, case.eps),
        "jsd": (case.beta, case.ignore_index),
        "tvd": (case.reduction, case.ignore_index),
    }[case.op]


def names(op: str) -> tuple[str, ...]:
    """Return the names of the op's tensors."""
    two = ("p", "q") if op == "tvd" else ("input", "target")
    return two if op == "kl_div" else (*two, "shift_labels")


def tensors(case: Any) -> Tensors:
    values = drawn_for(case)
    first, second = (
        torch.log_softmax(values.draw(case.shape, torch.float64, scale=case.scale), -1)
        for _ in range(2)
    )
    # Zero probabilities only where loss and gradients stay finite; another test has infinite ones.
    if case.zeros and first.numel():
        if kind(case) != "reverse_kl" or case.op == "tvd":
            second[..., 0] = -INF
        if kind(case) != "kl_div" or case.op == "tvd":
            first[..., -1] = second[..., -1] = -INF
    if case.op == "tvd":
        first = first.exp()
    if case.op == "tvd" or kind(case) == "kl_div":
        second = second.exp()
    first = laid_out(first.to(case.dtype), case.layout)
    other = case.dtype if case.second_dtype == SAME else case.second_dtype
    second = laid_out(second.to(other), case.dy_layout)
    drawn: Tensors = dict(zip(names(case.op), (first, second), strict=False))
    if case.op != "kl_div":
        drawn["shift_labels"] = None if case.ignored is None else targets(case)
    elementwise = case.reduction == "none" and case.op != "jsd"
    of_loss = torch.promote_types(torch.promote_types(first.dtype, second.dtype), torch.float32)
    layout = case.dy_layout if elementwise else "contiguous"
    drawn["dloss"] = values.draw(case.shape if elementwise else (), of_loss, layout)
    return drawn


def size(case: Any, tensors: Tensors) -> float:
    """Return a bound of the terms, with the relative error of exponentials by their exponents."""
    largest = 1 - math.log(max(case.eps, 1e-38)) * (kind(case) == "kl_div")
    for name in names(case.op)[:2]:
        finite = tensors[name].double().abs().nan_to_num(posinf=0.0)
        largest += float(finite.max()) if finite.numel() else 0.0
    return 1 if case.op == "tvd" else 2 * largest * (1 + largest)


def form(case: Any, tensors: Tensors) -> DistributionLoss:
    return FORMS[case.op](type("Call", (), {**vars(case), **tensors}))


def output_magnitudes(case: Any, tensors: Tensors) -> list[Magnitude]:
    called = form(case, tensors)
    rows = 1 if called.reduction == "none" else math.prod(case.shape[:-1])
    return [size(case, tensors) * rows / float(called.divisor)]


def gradient_magnitudes(case: Any, tensors: Tensors) -> list[Magnitude]:
    dloss = tensors["dloss"].double().abs()
    upstream = float(dloss.max()) if dloss.numel() else 0.0
    return [2 * size(case, tensors) * upstream / float(form(case, tensors).divisor)] * 2


WIDE = {"shape": (4, 128256)}


def described(op: str, sampled: Fields, forms: list[Fields], *compiled: Fields) -> OpUnderTest:
    return OpUnderTest(
        name=op,
        choices={
            **TARGETS, "op": (op,), "ignored": (None, 0, 1, 2, 3), "dy_layout": X_LAYOUTS,
            "second_dtype": (SAME, SAME, FP32), "reduction": ("batchmean", "mean", "sum", "none"),
            "log_target": (False, True), "eps": (1e-10, 0.0, 1e-2),
            "beta": (0.5, 0.1, 0.9, 0.0, 1.0),
            # Whether the first class has probability 0 in the second, and the last in both.
            "zeros": (False, True),
        },
        # Wide and narrow rows by the host code's own plan.
        cases={
            str(shape): {"shape": shape, "dtype": torch.bfloat16, **sampled}
            for shape in ((2, 20011), (70, 100))
        },
        tensors=tensors,
        no_gradient=("shift_labels",),
        output_magnitudes=output_magnitudes,
        gradient_magnitudes=gradient_magnitudes,
        sampled=sampled,
        forms=loss_forms(
            *forms, common={"ignored": None, "reduction": "batchmean"}, backward=True
        ),
        compiled=[{**WIDE, **form} for form in compiled],
        rowwise=(*names(op), "dloss"),
        rows_permute=lambda case: case.reduction == "none" and op != "jsd",
        shaping=(),
        # They launch the same kernels.
        cost=2,
        autocast_as="mul.Tensor",
    )  # fmt: skip


OPS = (
    described(
        "kl_div", {"eps": 1e-3}, [{"reduction": "none"}, {"log_target": True}],
        {"eps": 1e-10}, {"reduction": "none", "log_target": True},
    ),
    described(
        "jsd", {"beta": 0.3, "ignored": 3}, [{"ignored": 3}, {"beta": 1.0}],
        {"ignored": 3, "beta": 0.5}, {"beta": 1.0},
        {"ignored": 3, "beta": 0.5, "shape": (4, 100)},
    ),
    described(
        "tvd", {"reduction": "none", "ignored": 3}, [{"reduction": "none", "ignored": 3}],
        {"reduction": "mean", "ignored": 3},
    ),
)  # fmt: skip


def written(case: Any, first: Tensor, second: Tensor, labels: Tensor | None) -> Tensor:
    """Compute the loss as trainers write it, for tokens (M, V)."""
    kl = partial(torch.nn.functional.kl_div, reduction="none")
    if case.op == "kl_div":
        return torch.nn.functional.kl_div(
            first, second, reduction=case.reduction, log_target=case.log_target
        )
    if case.op == "tvd":
        terms = (first - second).abs() / 2
    elif case.beta in (0, 1):
        pair = (second, first) if case.beta else (first, second)
        terms = kl(*pair, log_target=True)
    else:
        log_m = torch.log(case.beta * second.exp() + (1 - case.beta) * first.exp())
        terms = case.beta * kl(log_m, second, log_target=True)
        terms = terms + (1 - case.beta) * kl(log_m, first, log_target=True)
    counted = torch.ones(len(first), dtype=torch.bool)
    if labels is not None:
        counted = labels != case.ignore_index
    terms = terms.masked_fill(~counted.unsqueeze(-1), 0.0)
    reduction = "batchmean" if case.op == "jsd" else case.reduction
    tokens = max(1, int(counted.sum()))
    divisor = {"mean": tokens * first.shape[-1], "batchmean": tokens}
    return terms if reduction == "none" else terms.sum() / divisor.get(reduction, 1)
