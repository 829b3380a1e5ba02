"""divergence under test, in the form of divergence_forward."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from cross_entropy_cases import targets
from liger_ops import library
from liger_ops.ops.losses.divergence import RESULTS as NAMES
from op_under_test import Case, Magnitude, OpUnderTest, Tensors, Values, max_abs


@dataclass(frozen=True, kw_only=True)
class DivergenceCase(Case):
    """A drawn use of divergence. shape is the shape of both logits."""

    kind: str = "jsd"
    beta: float = 0.5
    temperature: float = 1.0
    teacher_temperature: float | None = None
    # None for the student's.
    teacher_dtype: torch.dtype | None = None
    # One token in this many is ignored; 0 for none, 1 for all; None without a target.
    ignored: int | None = 3
    target_dtype: torch.dtype = torch.int64
    ignore_index: int = -100

    @property
    def options(self) -> tuple[Any, ...]:
        return (
            self.kind, self.beta, self.temperature, self.teacher_temperature, self.ignore_index,
        )  # fmt: skip


RESULTS = NAMES.split()


def tensors(case: DivergenceCase) -> Tensors:
    values = Values(case.seed)
    teacher_dtype = case.teacher_dtype or case.dtype
    given: Tensors = {
        "student_logits": values.draw(case.shape, case.dtype, case.layout, case.scale),
        "teacher_logits": values.draw(case.shape, teacher_dtype, case.dy_layout, case.scale),
        "target": None if case.ignored is None else targets(case),
    }
    forward = library.OPS["divergence_forward"].definition
    given.update(zip(RESULTS, forward(*forward_args(case, given)), strict=True))
    value = given["divergence"]
    layout = case.dy_layout if value.dim() else "contiguous"
    given["ddivergence"] = values.draw(tuple(value.shape), value.dtype, layout)
    return given


def forward_args(case: DivergenceCase, tensors: Tensors) -> tuple[Any, ...]:
    names = ("student_logits", "teacher_logits", "target")
    return (*(tensors[name] for name in names), *case.options)


def backward_args(case: DivergenceCase, tensors: Tensors) -> tuple[Any, ...]:
    names = ("ddivergence", "student_logits", "teacher_logits", "target", *RESULTS)
    return (*(tensors[name] for name in names), *case.options, list(case.output_mask[:2]))


def lse(case: DivergenceCase, tensors: Tensors) -> float:
    """A bound of both lse, and of the logarithms of the probabilities."""
    cooler = min(case.temperature, case.teacher_temperature or case.temperature)
    largest = max(max_abs(tensors["student_logits"]), max_abs(tensors["teacher_logits"]))
    return largest / cooler + math.log(case.shape[-1])


def output_magnitudes(case: DivergenceCase, tensors: Tensors) -> list[Magnitude]:
    size = lse(case, tensors)
    # A rounding error of lse is a relative error of each probability.
    terms = 2 * size * (1 + 2 * size)
    return [terms, terms, size, size]


def gradient_magnitudes(case: DivergenceCase, tensors: Tensors) -> list[Magnitude]:
    size = lse(case, tensors)
    upstream = max_abs(tensors["ddivergence"]) * 4 * size * (1 + 2 * size)
    temperatures = (case.temperature, case.teacher_temperature or case.temperature)
    return [upstream / temperature for temperature in temperatures]


def sample(dtype: torch.dtype = torch.float64, rows: int = 3, **form: Any) -> DivergenceCase:
    """A few of the rows are ignored."""
    options = {"beta": 0.3, "temperature": 0.8, "teacher_temperature": 1.3, **form}
    return DivergenceCase(shape=(rows, 2, 7), dtype=dtype, **options)


def described(kind: str) -> OpUnderTest:
    return OpUnderTest(
        name="divergence_forward",
        form=kind.replace("_", "-"),
        tensors=tensors,
        forward_args=forward_args,
        backward_args=backward_args,
        gradients_of=("student_logits", "teacher_logits"),
        gradients_from=("ddivergence",),
        no_gradient=("target",),
        output_magnitudes=output_magnitudes,
        gradient_magnitudes=gradient_magnitudes,
        sample=lambda dtype=torch.float64, rows=3, **form: sample(dtype, rows, kind=kind, **form),
        per_row=("student_logits", "teacher_logits", "target", *RESULTS, "ddivergence"),
        leading=(),
        autocast_as="mul.Tensor",
    )


OPS = (described("jsd"), described("forward_kl"))


def cosine_output_magnitudes(case: DivergenceCase, tensors: Tensors) -> list[Magnitude]:
    return [4.0, 4.0, max_abs(tensors["student_lse"]), max_abs(tensors["teacher_lse"])]


def cosine_gradient_magnitudes(case: DivergenceCase, tensors: Tensors) -> list[Magnitude]:
    temperatures = (case.temperature, case.teacher_temperature or case.temperature)
    norms = (tensors[f"{side}_lse"].unsqueeze(-1) for side in ("student", "teacher"))
    upstream = 4 * max_abs(tensors["ddivergence"])
    return [
        upstream / temperature / norm.masked_fill(norm == 0, 1.0)
        for temperature, norm in zip(temperatures, norms, strict=True)
    ]


# Its cases, like those of the other kinds, are launched with the forms of OPS.
COSINE = replace(
    described("cosine"),
    output_magnitudes=cosine_output_magnitudes,
    gradient_magnitudes=cosine_gradient_magnitudes,
)
