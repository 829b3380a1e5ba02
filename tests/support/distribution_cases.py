"""kl_div, jsd and tvd under test."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cross_entropy_cases import targets
from liger_ops.lowering.common.losses.distribution_loss import FORMS
from liger_ops.ops.losses.distribution_loss import Form
from op_under_test import Case, Magnitude, OpUnderTest, Tensors, Values, laid_out

INF = float("inf")


@dataclass(frozen=True, kw_only=True)
class DistributionCase(Case):
    """A drawn use of one of the losses. shape is the shape of both distributions."""

    op: str = "kl_div"
    reduction: str = "batchmean"
    log_target: bool = False
    eps: float = 1e-10
    beta: float = 0.5
    # None for the first's.
    second_dtype: torch.dtype | None = None
    # Whether the first class has probability 0 in the second, and the last class in both.
    zeros: bool = False
    # One token in this many is ignored; 0 for none, 1 for all; None without labels.
    ignored: int | None = None
    target_dtype: torch.dtype = torch.int64
    ignore_index: int = -100

    @property
    def options(self) -> tuple[Any, ...]:
        """The arguments of the op behind its tensors."""
        return {
            "kl_div": (self.reduction, self.log_target, self.eps),
            "jsd": (self.beta, self.ignore_index),
            "tvd": (self.reduction, self.ignore_index),
        }[self.op]

    @property
    def kind(self) -> str:
        if self.op == "kl_div":
            return "forward_kl" if self.log_target else "kl_div"
        return {0.0: "forward_kl", 1.0: "reverse_kl"}.get(self.beta, "jsd")


def names(op: str) -> tuple[str, ...]:
    """The op's tensors."""
    two = ("p", "q") if op == "tvd" else ("input", "target")
    return two if op == "kl_div" else (*two, "shift_labels")


def tensors(case: DistributionCase) -> Tensors:
    values = Values(case.seed)
    first, second = (
        torch.log_softmax(values.draw(case.shape, torch.float64, scale=case.scale), -1)
        for _ in range(2)
    )
    # Infinite losses, and infinite gradients, have a test of their own.
    if case.zeros and first.numel():
        if case.kind != "reverse_kl" or case.op == "tvd":
            second[..., 0] = -INF
        if case.kind != "kl_div" or case.op == "tvd":
            first[..., -1] = second[..., -1] = -INF
    if case.op == "tvd":
        first = first.exp()
    if case.op == "tvd" or case.kind == "kl_div":
        second = second.exp()
    first = laid_out(first.to(case.dtype), case.layout)
    second = laid_out(second.to(case.second_dtype or case.dtype), case.dy_layout)
    given: Tensors = dict(zip(names(case.op), (first, second), strict=False))
    if case.op != "kl_div":
        given["shift_labels"] = None if case.ignored is None else targets(case)
    elementwise = case.reduction == "none" and case.op != "jsd"
    of_loss = torch.promote_types(torch.promote_types(first.dtype, second.dtype), torch.float32)
    layout = case.dy_layout if elementwise else "contiguous"
    given["dloss"] = values.draw(case.shape if elementwise else (), of_loss, layout)
    return given


def forward_args(case: DistributionCase, tensors: Tensors) -> tuple[Any, ...]:
    return (*(tensors[name] for name in names(case.op)), *case.options)


def backward_args(case: DistributionCase, tensors: Tensors) -> tuple[Any, ...]:
    mask = list(case.output_mask[:2])
    return (tensors["dloss"], *forward_args(case, tensors), mask)


def size(case: DistributionCase, tensors: Tensors) -> float:
    """A bound of the terms, whose exponentials have the relative error of their exponents."""
    largest = 1 - math.log(max(case.eps, 1e-38)) * (case.kind == "kl_div")
    for name in names(case.op)[:2]:
        finite = tensors[name].double().abs().nan_to_num(posinf=0.0)
        largest += float(finite.max()) if finite.numel() else 0.0
    return 1 if case.op == "tvd" else 2 * largest * (1 + largest)


def form(case: DistributionCase, tensors: Tensors) -> Form:
    backward = dict(zip(("reduction", "log_target", "eps"), case.options, strict=False))
    fields = {**backward, "beta": case.beta, "ignore_index": case.ignore_index, **tensors}
    if case.op == "tvd":
        fields["reduction"] = case.reduction
    return FORMS[case.op](type("Call", (), fields))


def output_magnitudes(case: DistributionCase, tensors: Tensors) -> list[Magnitude]:
    called = form(case, tensors)
    rows = 1 if called.reduction == "none" else math.prod(case.shape[:-1])
    return [size(case, tensors) * rows / float(called.divisor)]


def gradient_magnitudes(case: DistributionCase, tensors: Tensors) -> list[Magnitude]:
    dloss = tensors["dloss"].double().abs()
    upstream = float(dloss.max()) if dloss.numel() else 0.0
    return [2 * size(case, tensors) * upstream / float(form(case, tensors).divisor)] * 2


def sample(
    op: str, dtype: torch.dtype = torch.float64, rows: int = 3, **fields: Any
) -> DistributionCase:
    usual = {
        "kl_div": {"eps": 1e-3},
        "jsd": {"beta": 0.3, "ignored": 3},
        "tvd": {"reduction": "none", "ignored": 3},
    }[op]
    return DistributionCase(**{"op": op, "shape": (rows, 2, 7), "dtype": dtype, **usual, **fields})


def described(op: str) -> OpUnderTest:
    return OpUnderTest(
        name=op,
        tensors=tensors,
        forward_args=forward_args,
        backward_args=backward_args,
        gradients_of=names(op)[:2],
        gradients_from=("dloss",),
        no_gradient=("shift_labels",),
        output_magnitudes=output_magnitudes,
        gradient_magnitudes=gradient_magnitudes,
        sample=partial(sample, op),
        per_row=(*names(op), "dloss"),
        leading=(),
        autocast_as="mul.Tensor",
    )


OPS = tuple(described(op) for op in ("kl_div", "jsd", "tvd"))


def written(case: DistributionCase, first: Tensor, second: Tensor, labels: Tensor | None) -> Tensor:
    """The loss as trainers write it, of tokens (M, V)."""
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
