"""divergence under test, in the form of divergence_forward."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from cross_entropy_cases import TARGETS, targets, vocabularies
from launch_forms import FP32, Fields, loss_forms, shapes
from liger_ops import library
from liger_ops.ops.losses.divergence import RESULTS as NAMES
from op_under_test import SAME, Magnitude, OpUnderTest, Tensors, drawn_for, max_abs

RESULTS = NAMES.split()


def tensors(case: Any) -> Tensors:
    values = drawn_for(case)
    drawn: Tensors = {
        "student_logits": values.draw(case.shape, SAME, case.layout, case.scale),
        "teacher_logits": values.draw(case.shape, case.teacher_dtype, case.dy_layout, case.scale),
        "target": None if case.ignored is None else targets(case),
    }
    forward = library.OPS["divergence_forward"].definition
    options = (case.kind, case.beta, case.temperature, case.teacher_temperature, case.ignore_index)
    drawn.update(zip(RESULTS, forward(*drawn.values(), *options), strict=True))
    value = drawn["divergence"]
    layout = case.dy_layout if value.dim() else "contiguous"
    drawn["ddivergence"] = values.draw(tuple(value.shape), value.dtype, layout)
    return drawn


def lse(case: Any, tensors: Tensors) -> float:
    """Return a bound of both lse, and of the log-probabilities."""
    cooler = min(case.temperature, case.teacher_temperature or case.temperature)
    largest = max(max_abs(tensors["student_logits"]), max_abs(tensors["teacher_logits"]))
    return largest / cooler + math.log(case.shape[-1])


def output_magnitudes(case: Any, tensors: Tensors) -> list[Magnitude]:
    size = lse(case, tensors)
    # A rounding error of lse is a relative error of each probability.
    terms = 2 * size * (1 + 2 * size)
    return [terms, terms, size, size]


def gradient_magnitudes(case: Any, tensors: Tensors) -> list[Magnitude]:
    size = lse(case, tensors)
    upstream = max_abs(tensors["ddivergence"]) * 4 * size * (1 + 2 * size)
    temperatures = (case.temperature, case.teacher_temperature or case.temperature)
    return [upstream / temperature for temperature in temperatures]


KINDS = ("jsd", "forward_kl", "reverse_kl", "tvd")
PLAIN = {"beta": 0.5, "temperature": 1.0, "teacher_temperature": None, "ignored": None}


def described(kind: str, *options: Fields) -> OpUnderTest:
    return OpUnderTest(
        name="divergence_forward",
        form=kind.replace("_", "-"),
        choices={
            # None for no target.
            **TARGETS, "ignored": (3, None, 0, 1, 2), "teacher_dtype": (SAME, SAME, FP32),
            "kind": KINDS if kind != "cosine" else (kind,),
            "beta": (0.5, 0.1, 0.9, 0.0, 1.0), "temperature": (1.0, 0.6, 2.5),
            "teacher_temperature": (None, 0.7, 2.0),
        },
        tensors=tensors,
        no_gradient=("target",),
        output_magnitudes=output_magnitudes,
        gradient_magnitudes=gradient_magnitudes,
        cases=vocabularies(151936, rows=2, kind=kind, temperature=0.7 if kind == "jsd" else 1.0),
        sampled={"kind": kind, "beta": 0.3, "temperature": 0.8, "teacher_temperature": 1.3},
        forms=loss_forms(
            *options, common=PLAIN, backward=True,
            executed=({"shape": (7, 300), "tile": (2, 128), "kind": "cosine"},),
        ),
        compiled=[
            {**form, "temperature": 0.7, "ignored": 3, "kind": one}
            for form in shapes((4, 100), (4, 128256))
            for one in (("jsd", "cosine") if kind == "jsd" else ())
        ],
        shaping=(),
        autocast_as="mul.Tensor",
    )  # fmt: skip


OPS = (
    described("jsd", {"beta": 0.1, "temperature": 0.7}, {"kind": "tvd"}),
    described("forward_kl", {"kind": "reverse_kl"}, {"kind": "cosine"}),
)


def cosine_output_magnitudes(case: Any, tensors: Tensors) -> list[Magnitude]:
    return [4.0, 4.0, max_abs(tensors["student_lse"]), max_abs(tensors["teacher_lse"])]


def cosine_gradient_magnitudes(case: Any, tensors: Tensors) -> list[Magnitude]:
    temperatures = (case.temperature, case.teacher_temperature or case.temperature)
    norms = (tensors[f"{side}_lse"].unsqueeze(-1) for side in ("student", "teacher"))
    upstream = 4 * max_abs(tensors["ddivergence"])
    return [
        upstream / temperature / norm.masked_fill(norm == 0, 1.0)
        for temperature, norm in zip(temperatures, norms, strict=True)
    ]


# Not in OPS: the forms of OPS launch its kernel.
COSINE = replace(
    described("cosine"),
    output_magnitudes=cosine_output_magnitudes,
    gradient_magnitudes=cosine_gradient_magnitudes,
)
