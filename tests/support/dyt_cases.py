"""dyt under test."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from op_under_test import Case, OpUnderTest, Tensors, Values, max_abs


@dataclass(frozen=True, kw_only=True)
class DytCase(Case):
    output_mask: tuple[bool, ...] = (True, True, True, True)
    alpha: float = 0.5
    alpha_shape: tuple[int, ...] = (1,)
    gamma_dtype: torch.dtype | None = None
    beta_dtype: torch.dtype | None = None


def tensors(case: DytCase) -> Tensors:
    values = Values(case.seed)
    columns, parameter_dtype = case.shape[-1:], case.gamma_dtype or case.dtype
    return {
        "x": values.draw(case.shape, case.dtype, case.layout, case.scale),
        "alpha": values.draw(case.alpha_shape, parameter_dtype, scale=0.1 * case.alpha)
        + case.alpha,
        "gamma": values.draw(columns, parameter_dtype),
        "beta": values.draw(columns, case.beta_dtype),
        "dy": values.draw(case.shape, case.dtype, case.dy_layout),
    }


def output_magnitudes(case: DytCase, tensors: Tensors) -> list[float]:
    return [max_abs(tensors["gamma"]) + max_abs(tensors["beta"])]


def gradient_magnitudes(case: DytCase, tensors: Tensors) -> list[float]:
    """The magnitudes of dx, dalpha, dgamma and dbeta. A sum's rounding errors are those of its
    terms, whose slope is at most 1."""
    x, alpha, gamma, dy = (tensors[name].double() for name in ("x", "alpha", "gamma", "dy"))
    if x.numel() == 0:
        return [0.0] * 4
    terms = dy.abs().reshape(-1, x.shape[-1]).sum(0)
    g = (dy * gamma).abs()
    of_alpha = float((g * x.abs()).sum())
    return [float(alpha.abs() * g.max()), of_alpha, float(terms.max()), float(terms.max())]


def sample(dtype: torch.dtype = torch.float64, rows: int = 3, **form: Any) -> DytCase:
    return DytCase(shape=(rows, 2, 7), dtype=dtype, beta_dtype=dtype, **form)


OPS = (
    OpUnderTest(
        name="dyt",
        tensors=tensors,
        forward_args=lambda c, t: (t["x"], t["alpha"], t["gamma"], t["beta"]),
        backward_args=lambda c, t: (
            *(t[name] for name in ("dy", "x", "alpha", "gamma", "beta")),
            list(c.output_mask),
        ),
        gradients_of=("x", "alpha", "gamma", "beta"),
        output_magnitudes=output_magnitudes,
        gradient_magnitudes=gradient_magnitudes,
        sample=sample,
        per_row=("x", "dy"),
        leading=("x",),
        autocast_as="tanh",
    ),
)
