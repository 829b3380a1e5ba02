"""poly_norm under test."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from op_under_test import Case, OpUnderTest, Tensors, Values, max_abs


@dataclass(frozen=True, kw_only=True)
class PolyNormCase(Case):
    weight_dtype: torch.dtype | None = None
    bias_dtype: torch.dtype | None = None
    bias_shape: tuple[int, ...] = (1,)
    eps: float = 1e-6


def tensors(case: PolyNormCase) -> Tensors:
    values = Values(case.seed)
    return {
        "x": values.draw(case.shape, case.dtype, case.layout, case.scale),
        "weight": values.draw((3,), case.weight_dtype or case.dtype),
        "bias": values.draw(case.bias_shape, case.bias_dtype),
        "dy": values.draw(case.shape, case.dtype, case.dy_layout),
    }


def powers(case: PolyNormCase, tensors: Tensors) -> list[tuple[Tensor, Tensor, Tensor]]:
    """The absolute values for x**3, x**2 and x: the weight, the norm, and the norm's slope in x."""
    x = tensors["x"].double().abs()
    found = []
    for p, weight in zip((3, 2, 1), tensors["weight"].double().abs(), strict=True):
        rstd = (x.pow(2 * p).mean(-1, keepdim=True) + case.eps).rsqrt()
        found.append((weight, x.pow(p) * rstd, p * x.pow(p - 1) * rstd))
    return found


def output_magnitudes(case: PolyNormCase, tensors: Tensors) -> list[float]:
    if tensors["x"].numel() == 0:
        return [0.0]
    terms = sum(weight * norm for weight, norm, _ in powers(case, tensors))
    return [float(terms.max()) + max_abs(tensors["bias"])]


def gradient_magnitudes(case: PolyNormCase, tensors: Tensors) -> list[float]:
    dy = tensors["dy"].double().abs()
    if dy.numel() == 0:
        return [0.0] * 3
    found = powers(case, tensors)
    dx = sum(
        weight * slope * (dy + norm * (dy * norm).mean(-1, keepdim=True))
        for weight, norm, slope in found
    )
    of_weight = max(float((dy * norm).sum()) for _, norm, _ in found)
    return [float(dx.max()), of_weight, float(dy.sum())]


def sample(dtype: torch.dtype = torch.float64, rows: int = 3, **form: Any) -> PolyNormCase:
    # Never 3 rows: torch.compile takes sizes that are equal at first for one dynamic size, and that
    # of weight is fixed.
    return PolyNormCase(shape=(2 * rows, 2, 7), dtype=dtype, bias_dtype=dtype, **form)


OPS = (
    OpUnderTest(
        name="poly_norm",
        tensors=tensors,
        forward_args=lambda c, t: (t["x"], t["weight"], t["bias"], c.eps),
        backward_args=lambda c, t: (
            *(t[name] for name in ("dy", "x", "weight", "bias")),
            c.eps,
            list(c.output_mask),
        ),
        gradients_of=("x", "weight", "bias"),
        output_magnitudes=output_magnitudes,
        gradient_magnitudes=gradient_magnitudes,
        sample=sample,
        per_row=("x", "dy"),
        leading=("x",),
        autocast_as="pow.Tensor_Scalar",
    ),
)
