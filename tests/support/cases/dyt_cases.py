"""dyt and poly_norm under test."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from launch_forms import FP32, KEPT, masks, rows, shapes
from norm_cases import COMPILED, DX_ALONE, EPS, PARAMETER, wide
from op_under_test import SAME, OpUnderTest, Tensors, drawn_for, max_abs

# The shapes of a parameter that is one number.
ONE = ((1,), ())


def dyt_tensors(case: Any) -> Tensors:
    values, columns, dtype = drawn_for(case), case.shape[-1:], case.gamma_dtype
    return {
        "x": values.draw(case.shape, SAME, case.layout, case.scale),
        "alpha": values.draw(case.alpha_shape, dtype, scale=0.1 * case.about) + case.about,
        "gamma": values.draw(columns, dtype),
        "beta": values.draw(columns, case.beta_dtype),
        "dy": values.draw(case.shape, SAME, case.dy_layout),
    }


def dyt_gradient_magnitudes(case: Any, tensors: Tensors) -> list[float]:
    """Return the magnitudes of dx, dalpha, dgamma and dbeta.

    A sum's rounding errors are those of its terms, and the slope of tanh is at most 1.
    """
    x, alpha, gamma, dy = (tensors[name].double() for name in ("x", "alpha", "gamma", "dy"))
    if x.numel() == 0:
        return [0.0] * 4
    terms = dy.abs().reshape(-1, x.shape[-1]).sum(0)
    g = (dy * gamma).abs()
    of_alpha = float((g * x.abs()).sum())
    return [float(alpha.abs() * g.max()), of_alpha, float(terms.max()), float(terms.max())]


def poly_tensors(case: Any) -> Tensors:
    values = drawn_for(case)
    return {
        "x": values.draw(case.shape, SAME, case.layout, case.scale),
        "weight": values.draw((3,), case.weight_dtype),
        "bias": values.draw(case.bias_shape, case.bias_dtype),
        "dy": values.draw(case.shape, SAME, case.dy_layout),
    }


def powers(case: Any, tensors: Tensors) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return absolute values for x**3, x**2 and x: the weight, the norm, and its slope in x."""
    x = tensors["x"].double().abs()
    terms = []
    for p, weight in zip((3, 2, 1), tensors["weight"].double().abs(), strict=True):
        rstd = (x.pow(2 * p).mean(-1, keepdim=True) + case.eps).rsqrt()
        terms.append((weight, x.pow(p) * rstd, p * x.pow(p - 1) * rstd))
    return terms


def poly_output_magnitudes(case: Any, tensors: Tensors) -> list[float]:
    if tensors["x"].numel() == 0:
        return [0.0]
    terms = sum(weight * norm for weight, norm, _ in powers(case, tensors))
    return [float(terms.max()) + max_abs(tensors["bias"])]


def poly_gradient_magnitudes(case: Any, tensors: Tensors) -> list[float]:
    dy = tensors["dy"].double().abs()
    if dy.numel() == 0:
        return [0.0] * 3
    terms = powers(case, tensors)
    dx = sum(
        weight * slope * (dy + norm * (dy * norm).mean(-1, keepdim=True))
        for weight, norm, slope in terms
    )
    of_weight = max(float((dy * norm).sum()) for _, norm, _ in terms)
    return [float(dx.max()), of_weight, float(dy.sum())]


DYT = OpUnderTest(
    name="dyt",
    choices={
        "about": (0.5, -1.0, 0.01), "alpha_shape": ONE, "gamma_dtype": (SAME, FP32),
        "beta_dtype": PARAMETER,
    },
    tensors=dyt_tensors,
    output_magnitudes=lambda c, t: [max_abs(t["gamma"]) + max_abs(t["beta"])],
    gradient_magnitudes=dyt_gradient_magnitudes,
    sampled={"beta_dtype": SAME},
    cases=wide(17001, beta_dtype=SAME),
    forms=rows(
        {"gamma_dtype": FP32, "beta_dtype": None},
        backward=tuple(
            {"output_mask": tuple(i in subset for i in range(4))}
            for subset in ((0,), (1,), (3,), (1, 2, 3))
        ),
    ),
    compiled=shapes((4, 100), (4, 4096)),
    autocast_as="tanh",
)  # fmt: skip

POLY_NORM = OpUnderTest(
    name="poly_norm",
    choices={
        "weight_dtype": (SAME, FP32), "bias_dtype": PARAMETER, "bias_shape": ONE, "eps": EPS,
    },
    tensors=poly_tensors,
    output_magnitudes=poly_output_magnitudes,
    gradient_magnitudes=poly_gradient_magnitudes,
    # Never 3 rows: torch.compile takes sizes that are equal at first for one dynamic size, and that
    # of weight is fixed.
    sample_shape=lambda rows: (2 * rows, 2, 7),
    sampled={"bias_dtype": SAME},
    cases={
        **wide(17001, bias_dtype=SAME),
        # A tile is padded with rows of zeros, whose 1 / rms is infinite without an eps.
        "zero-eps": {
            "shape": (3, 13), "dtype": FP32, "bias_dtype": FP32, "eps": 0.0, "tile": (4, 64),
        },
        # x**6 is 1e30.
        "large": {"shape": (3, 100), "dtype": FP32, "bias_dtype": FP32, "scale": 1e5},
    },
    forms=rows(
        {"weight_dtype": FP32, "bias_dtype": None}, backward=(DX_ALONE, *masks(3)),
        executed=(KEPT,),
    ),
    compiled=COMPILED,
    autocast_as="pow.Tensor_Scalar",
)  # fmt: skip

OPS = (DYT, POLY_NORM)
