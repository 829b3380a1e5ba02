"""softmax, log_softmax and sparsemax under test."""

from __future__ import annotations

from functools import partial
from typing import Any

from launch_forms import COUNTED_WITH_LARGE, FP32, KEPT, Fields, rows, shapes
from liger_ops import library
from norm_cases import wide
from op_under_test import (
    SAME,
    Magnitude,
    OpUnderTest,
    Pick,
    Tensors,
    drawn_for,
    laid_out,
    leading_shape,
    sizes,
)


def tensors(op: str, case: Any) -> Tensors:
    values = drawn_for(case)
    x = values.draw(case.shape, SAME, "contiguous", case.scale, case.shift)
    return {
        "x": laid_out(x, case.layout),
        "y": laid_out(library.OPS[op].definition(x), case.layout),
        "dy": values.draw(case.shape, SAME, case.dy_layout),
    }


def shifted_rows(pick: Pick, fields: Fields) -> Fields:
    """Draw rows of any size, also empty. The largest scale has no shift: float16 would overflow."""
    shape = (*leading_shape(pick), pick((0, *sizes(fields["tile"]))))
    return {"shape": shape, "shift": fields["shift"] if fields["scale"] <= 10 else 0.0}


def output_magnitudes(op: str, case: Any, tensors: Tensors) -> list[Magnitude]:
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


def gradient_magnitudes(op: str, case: Any, tensors: Tensors) -> list[float]:
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


def softmax(name: str, autocast_as: str) -> OpUnderTest:
    sparse = name == "sparsemax_forward"
    return OpUnderTest(
        name=name,
        choices={"scale": (1.0, 0.05, 10.0, 1e4), "shift": (0.0, 30.0)},
        coupled=shifted_rows,
        tensors=partial(tensors, name),
        output_magnitudes=partial(output_magnitudes, name),
        gradient_magnitudes=partial(gradient_magnitudes, name),
        cases={
            # All elements are in the support.
            "flat": {"shape": (2, 40000), "dtype": FP32, "scale": 1e-6},
            **wide(*((4096, 65536) if sparse else (4096, 32000, 65536, 70003))),
        },
        # Rows that fit nowhere are read with every step of sparsemax's iteration: not counted.
        forms=rows(
            counted={i: more for i, more in COUNTED_WITH_LARGE.items() if i < 7 or not sparse},
            executed=(KEPT,),
        ),
        compiled=shapes((4, 100), (4, 4096), (4, 32768), (4, 65536)),
        shaping=("x", "y"),
        autocast_as=autocast_as,
    )


OPS = (
    softmax("softmax", "softmax.int"),
    softmax("log_softmax", "log_softmax.int"),
    softmax("sparsemax_forward", "cumsum"),
)
