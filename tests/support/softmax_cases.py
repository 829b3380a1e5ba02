"""softmax, log_softmax and sparsemax under test."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from liger_ops import library
from op_under_test import Case, Magnitude, OpUnderTest, Tensors, Values, laid_out


def tensors(op: str, case: Case) -> Tensors:
    values = Values(case.seed)
    x = values.draw(case.shape, case.dtype, "contiguous", case.scale, case.shift)
    return {
        "x": laid_out(x, case.layout),
        "y": laid_out(library.OPS[op].definition(x), case.layout),
        "dy": values.draw(case.shape, case.dtype, case.dy_layout),
    }


def output_magnitudes(op: str, case: Case, tensors: Tensors) -> list[Magnitude]:
    x, y = tensors["x"].double(), tensors["y"].double()
    if x.numel() == 0:
        return [0.0]
    if op == "sparsemax_forward":
        # The distance of the largest element from tau. No element of the support is farther.
        return [y.amax(-1, keepdim=True)]
    # The rounding error of x - max(x) is a relative error of its exponential.
    exponent = 1 + (x - x.amax(-1, keepdim=True)).abs()
    terms = y * exponent if op == "softmax" else y.abs() + exponent
    return [float(terms.max())]


def gradient_magnitudes(op: str, case: Case, tensors: Tensors) -> list[float]:
    y, dy = tensors["y"].double(), tensors["dy"].double().abs()
    if y.numel() == 0:
        return [0.0]
    if op == "softmax":
        terms = y * (dy + (dy * y).sum(-1, keepdim=True))
    elif op == "sparsemax_forward":
        terms = 2 * dy.amax(-1)
    else:
        terms = dy + y.exp() * dy.sum(-1, keepdim=True)
    return [float(terms.max())]


def sample(dtype: torch.dtype = torch.float64, rows: int = 3, **form: Any) -> Case:
    return Case(shape=(rows, 2, 7), dtype=dtype, **form)


def softmax(name: str, autocast_as: str) -> OpUnderTest:
    return OpUnderTest(
        name=name,
        tensors=partial(tensors, name),
        forward_args=lambda c, t: (t["x"],),
        backward_args=lambda c, t: (t["dy"], t["y"]),
        gradients_of=("x",),
        backward_from_output=True,
        output_magnitudes=partial(output_magnitudes, name),
        gradient_magnitudes=partial(gradient_magnitudes, name),
        sample=sample,
        per_row=("x", "y", "dy"),
        leading=("x", "y"),
        autocast_as=autocast_as,
    )


OPS = (
    softmax("softmax", "softmax.int"),
    softmax("log_softmax", "log_softmax.int"),
    softmax("sparsemax_forward", "cumsum"),
)
