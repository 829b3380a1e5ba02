"""mhc_coeffs, mhc_pre and mhc_post_res under test."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from liger_ops import library
from op_under_test import Case, Magnitude, OpUnderTest, Tensors, Values, max_abs


@dataclass(frozen=True, kw_only=True)
class MHCCase(Case):
    """A drawn use of an op of hyper-connections. shape is that of x, (..., hc, C)."""

    # The dtype of h_pre, h_post and h_res, or of phi, b and the alphas; None for x's.
    other_dtype: torch.dtype | None = torch.float32
    f_dtype: torch.dtype | None = None
    output_mask: tuple[bool, ...] = (True,) * 6
    tmax: int = 4
    rms_eps: float = 1e-6
    pre_eps: float = 0.01
    sinkhorn_eps: float = 1e-6
    post_mult: float = 2.0
    # The deviation of the logits, about.
    sharpness: float = 1.0
    # The mean of b.
    b_shift: float = 0.0

    @property
    def hc(self) -> int:
        return self.shape[-2]

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.shape[:-2]


def stream_tensors(case: MHCCase) -> Tensors:
    values = Values(case.seed)
    *tokens, hc, C = case.shape
    dtype = case.other_dtype or case.dtype
    return {
        "x": values.draw(case.shape, case.dtype, case.layout, case.scale),
        "f_out": values.draw((*tokens, C), case.f_dtype or case.dtype, case.layout, case.scale),
        "h_pre": values.draw((*tokens, hc), dtype, case.layout),
        "h_post": values.draw((*tokens, hc), dtype, case.layout),
        "h_res": values.draw((*tokens, hc, hc), dtype, case.layout),
        "dy_pre": values.draw((*tokens, C), case.dtype, case.dy_layout),
        "dy": values.draw(case.shape, case.dtype, case.dy_layout),
    }


def pre_tensors(case: MHCCase) -> Tensors:
    drawn = stream_tensors(case)
    return {"x": drawn["x"], "h_pre": drawn["h_pre"], "dy": drawn["dy_pre"]}


def post_res_tensors(case: MHCCase) -> Tensors:
    drawn = stream_tensors(case)
    return {name: drawn[name] for name in ("x", "f_out", "h_post", "h_res", "dy")}


def largest(tensors: Tensors, *names: str) -> list[float]:
    return [max_abs(tensors[name]) for name in names]


def pre_gradient_magnitudes(case: MHCCase, tensors: Tensors) -> list[Magnitude]:
    x, h, dy = largest(tensors, "x", "h_pre", "dy")
    return [h * dy, case.shape[-1] * x * dy]


def post_res_magnitudes(case: MHCCase, tensors: Tensors) -> list[Magnitude]:
    x, f, h_post, h_res = largest(tensors, "x", "f_out", "h_post", "h_res")
    return [case.hc * h_res * x + h_post * f]


def post_res_gradient_magnitudes(case: MHCCase, tensors: Tensors) -> list[Magnitude]:
    x, f, h_post, h_res, dy = largest(tensors, "x", "f_out", "h_post", "h_res", "dy")
    hc, C = case.shape[-2:]
    return [hc * h_res * dy, hc * h_post * dy, C * dy * f, C * dy * x]


ALPHAS = ("alpha_pre", "alpha_post", "alpha_res")
RESULTS = ("h_pre", "h_post", "h_res")
INPUTS = ("x", "phi", "b", *ALPHAS)


def coeffs_tensors(case: MHCCase) -> Tensors:
    values = Values(case.seed)
    *tokens, hc, C = case.shape
    columns = hc * hc + 2 * hc
    dtype = case.other_dtype or case.dtype
    # The product of a normalised row with a column of phi is about 1.
    scale = case.sharpness / (hc * C) ** 0.5
    given: Tensors = {
        "x": values.draw(case.shape, case.dtype, case.layout, case.scale),
        "phi": values.draw((hc * C, columns), dtype, case.layout, scale),
        "b": values.draw((columns,), dtype, shift=case.b_shift),
        **{name: values.draw((), dtype, shift=1.0) for name in ALPHAS},
    }
    forward = library.OPS["mhc_coeffs_forward"].definition
    results = forward(*coeffs_forward_args(case, given))
    given.update(product=results[3], rstd=results[4])
    for name, result in zip(RESULTS, results, strict=False):
        given[f"d{name}"] = values.draw(tuple(result.shape), result.dtype, case.dy_layout)
    return given


def coeffs_forward_args(case: MHCCase, tensors: Tensors) -> tuple[Any, ...]:
    options = (case.tmax, case.rms_eps, case.pre_eps, case.sinkhorn_eps, case.post_mult)
    return (*(tensors[name] for name in INPUTS), *options)


def coeffs_backward_args(case: MHCCase, tensors: Tensors) -> tuple[Any, ...]:
    names = (*(f"d{name}" for name in RESULTS), *INPUTS, "product", "rstd")
    options = (case.tmax, case.rms_eps, case.sinkhorn_eps, case.post_mult)
    return (*(tensors[name] for name in names), *options, list(case.output_mask[:6]))


def logit_terms(case: MHCCase, tensors: Tensors) -> tuple[float, float, float, float]:
    """The largest sum of the terms of mix, the largest logit made of them, 1 / rms and alpha."""
    if not tensors["x"].numel():
        return 0.0, 0.0, 0.0, 0.0
    rows = tensors["x"].double().flatten(-2).abs()
    rstd = (rows.square().mean(-1, keepdim=True) + case.rms_eps).rsqrt()
    mix = float((rows @ tensors["phi"].double().abs() * rstd).max())
    alpha = max(largest(tensors, *ALPHAS))
    return mix, mix * alpha + max_abs(tensors["b"]), float(rstd.max()), alpha


def coeffs_magnitudes(case: MHCCase, tensors: Tensors) -> list[Magnitude]:
    _, logit, _, _ = logit_terms(case, tensors)
    # The slope of a sigmoid is at most 1/4. An entry of h_res changes at most by itself times the
    # change of two logits, and each of the 2 * tmax divisions rounds it.
    return [1 + logit / 4, case.post_mult * (1 + logit / 4), 2 * case.tmax + 2 * logit]


def coeffs_gradient_magnitudes(case: MHCCase, tensors: Tensors) -> list[Magnitude]:
    mix, logit, rstd, alpha = logit_terms(case, tensors)
    tokens = torch.Size(case.tokens).numel()
    upstream = max(largest(tensors, "dh_pre", "dh_post", "dh_res"))
    dlogit = upstream * max(1.0, case.post_mult) * (1 + logit + 2 * case.tmax)
    columns = case.hc * (case.hc + 2)
    dmix = dlogit * alpha
    x, phi = largest(tensors, "x", "phi")
    of_norm = columns * dmix * mix * rstd**2 / (case.hc * case.shape[-1])
    dalpha = tokens * columns * dlogit * mix
    return [
        columns * dmix * rstd * phi + x * of_norm, tokens * x * dmix * rstd, tokens * dlogit,
        dalpha, dalpha, dalpha,
    ]  # fmt: skip


def sample(dtype: torch.dtype = torch.float64, rows: int = 3, **form: Any) -> MHCCase:
    return MHCCase(shape=(rows, 2, 2, 7), dtype=dtype, other_dtype=dtype, **form)


OPS = (
    OpUnderTest(
        name="mhc_pre",
        tensors=pre_tensors,
        forward_args=lambda c, t: (t["x"], t["h_pre"]),
        backward_args=lambda c, t: (t["dy"], t["x"], t["h_pre"], list(c.output_mask[:2])),
        gradients_of=("x", "h_pre"),
        output_magnitudes=lambda c, t: [
            c.hc * max_abs(t["h_pre"]) * max_abs(t["x"]),
        ],
        gradient_magnitudes=pre_gradient_magnitudes,
        sample=sample,
        per_row=("x", "h_pre", "dy"),
        leading=("x",),
        autocast_as="mul.Tensor",
    ),
    OpUnderTest(
        name="mhc_post_res",
        tensors=post_res_tensors,
        forward_args=lambda c, t: (t["x"], t["f_out"], t["h_post"], t["h_res"]),
        backward_args=lambda c, t: (
            *(t[name] for name in ("dy", "x", "f_out", "h_post", "h_res")),
            list(c.output_mask[:4]),
        ),
        gradients_of=("x", "f_out", "h_post", "h_res"),
        output_magnitudes=post_res_magnitudes,
        gradient_magnitudes=post_res_gradient_magnitudes,
        sample=sample,
        per_row=("x", "f_out", "h_post", "h_res", "dy"),
        leading=("x",),
        multiplies=True,
        autocast_as="bmm",
    ),
    OpUnderTest(
        name="mhc_coeffs_forward",
        tensors=coeffs_tensors,
        forward_args=coeffs_forward_args,
        backward_args=coeffs_backward_args,
        gradients_of=INPUTS,
        gradients_from=tuple(f"d{name}" for name in RESULTS),
        output_magnitudes=coeffs_magnitudes,
        gradient_magnitudes=coeffs_gradient_magnitudes,
        sample=sample,
        per_row=("x", "product", "rstd", *(f"d{name}" for name in RESULTS)),
        leading=("x",),
        multiplies=True,
        autocast_as="linear",
    ),
)
