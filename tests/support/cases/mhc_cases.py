"""mhc_coeffs, mhc_pre and mhc_post_res under test. A case's shape is x's, (..., hc, C)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from launch_forms import BF16, FP32, LARGE, ROWS, Fields, Forms, shapes
from liger_ops import library
from op_under_test import (
    SAME,
    Magnitude,
    OpUnderTest,
    Pick,
    Tensors,
    drawn_for,
    leading_shape,
    max_abs,
)


def stream_tensors(case: Any) -> Tensors:
    values = drawn_for(case)
    *tokens, hc, C = case.shape
    dtype = case.other_dtype
    return {
        "x": values.draw(case.shape, SAME, case.layout, case.scale),
        "f_out": values.draw((*tokens, C), case.f_dtype, case.layout, case.scale),
        "h_pre": values.draw((*tokens, hc), dtype, case.layout),
        "h_post": values.draw((*tokens, hc), dtype, case.layout),
        "h_res": values.draw((*tokens, hc, hc), dtype, case.layout),
        "dy_pre": values.draw((*tokens, C), SAME, case.dy_layout),
        "dy": values.draw(case.shape, SAME, case.dy_layout),
    }


def pre_tensors(case: Any) -> Tensors:
    drawn = stream_tensors(case)
    return {"x": drawn["x"], "h_pre": drawn["h_pre"], "dy": drawn["dy_pre"]}


def post_res_tensors(case: Any) -> Tensors:
    drawn = stream_tensors(case)
    return {name: drawn[name] for name in ("x", "f_out", "h_post", "h_res", "dy")}


def largest(tensors: Tensors, *names: str) -> list[float]:
    return [max_abs(tensors[name]) for name in names]


def pre_gradient_magnitudes(case: Any, tensors: Tensors) -> list[Magnitude]:
    x, h, dy = largest(tensors, "x", "h_pre", "dy")
    return [h * dy, case.shape[-1] * x * dy]


def post_res_magnitudes(case: Any, tensors: Tensors) -> list[Magnitude]:
    x, f, h_post, h_res = largest(tensors, "x", "f_out", "h_post", "h_res")
    return [case.shape[-2] * h_res * x + h_post * f]


def post_res_gradient_magnitudes(case: Any, tensors: Tensors) -> list[Magnitude]:
    x, f, h_post, h_res, dy = largest(tensors, "x", "f_out", "h_post", "h_res", "dy")
    hc, C = case.shape[-2:]
    return [hc * h_res * dy, hc * h_post * dy, C * dy * f, C * dy * x]


ALPHAS = ("alpha_pre", "alpha_post", "alpha_res")
RESULTS = ("h_pre", "h_post", "h_res")
INPUTS = ("x", "phi", "b", *ALPHAS)


def coeffs_tensors(case: Any) -> Tensors:
    values = drawn_for(case)
    *tokens, hc, C = case.shape
    columns = hc * hc + 2 * hc
    dtype = case.other_dtype
    # The product of a normalised row with a column of phi is about 1.
    scale = case.sharpness / (hc * C) ** 0.5
    drawn: Tensors = {
        "x": values.draw(case.shape, SAME, case.layout, case.scale),
        "phi": values.draw((hc * C, columns), dtype, case.layout, scale),
        "b": values.draw((columns,), dtype, shift=case.b_shift),
        **{name: values.draw((), dtype, shift=1.0) for name in ALPHAS},
    }
    forward = library.OPS["mhc_coeffs_forward"].definition
    options = (case.tmax, case.rms_eps, case.pre_eps, case.sinkhorn_eps, case.post_mult)
    results = forward(*(drawn[name] for name in INPUTS), *options)
    drawn.update(product=results[3], rstd=results[4])
    for name, result in zip(RESULTS, results, strict=False):
        drawn[f"d{name}"] = values.draw(tuple(result.shape), result.dtype, case.dy_layout)
    return drawn


def logit_terms(case: Any, tensors: Tensors) -> tuple[float, float, float, float]:
    """Return the largest sum of the terms of mix, the largest logit from it, 1 / rms and alpha."""
    if not tensors["x"].numel():
        return 0.0, 0.0, 0.0, 0.0
    rows = tensors["x"].double().flatten(-2).abs()
    rstd = (rows.square().mean(-1, keepdim=True) + case.rms_eps).rsqrt()
    mix = float((rows @ tensors["phi"].double().abs() * rstd).max())
    alpha = max(largest(tensors, *ALPHAS))
    return mix, mix * alpha + max_abs(tensors["b"]), float(rstd.max()), alpha


def coeffs_magnitudes(case: Any, tensors: Tensors) -> list[Magnitude]:
    _, logit, _, _ = logit_terms(case, tensors)
    # The slope of a sigmoid is at most 1/4. An entry of h_res changes at most by itself times the
    # change of two logits, and each of the 2 * tmax divisions rounds it.
    return [1 + logit / 4, abs(case.post_mult) * (1 + logit / 4), 2 * case.tmax + 2 * logit]


def coeffs_gradient_magnitudes(case: Any, tensors: Tensors) -> list[Magnitude]:
    mix, logit, rstd, alpha = logit_terms(case, tensors)
    tokens = torch.Size(case.shape[:-2]).numel()
    upstream = max(largest(tensors, "dh_pre", "dh_post", "dh_res"))
    dlogit = upstream * max(1.0, abs(case.post_mult)) * (1 + logit + 2 * case.tmax)
    columns = case.shape[-2] * (case.shape[-2] + 2)
    dmix = dlogit * alpha
    x, phi = largest(tensors, "x", "phi")
    of_norm = columns * dmix * mix * rstd**2 / (case.shape[-2] * case.shape[-1])
    dalpha = tokens * columns * dlogit * mix
    return [
        columns * dmix * rstd * phi + x * of_norm, tokens * x * dmix * rstd, tokens * dlogit,
        dalpha, dalpha, dalpha,
    ]  # fmt: skip


CHANNELS = (1, 2, 7, 16, 31, 64, 127, 257)


def streams(pick: Pick, fields: Fields) -> Fields:
    tile = fields["tile"]
    sizes = [C for C in CHANNELS if tile is None or 5 * tile[1] >= C]
    return {"shape": (*leading_shape(pick), pick((1, 2, 3, 4, 4, 5, 8)), pick(sizes))}


# The shapes of DeepSeek-V4 and of its small version, odd ones, and more streams than models have.
LAUNCHED = ((4, 4096), (3, 100), (8, 512), *((4, C) for C in LARGE))
MANY = (*LAUNCHED, (64, 100))


def hyper_connection(
    name: str, alone: int, sizes: tuple[tuple[int, int], ...], tensors: Callable[..., Tensors],
    cases: dict[str, Fields], autocast_as: str, **more: Any,
) -> OpUnderTest:  # fmt: skip
    """Return an entry. Each of the first `alone` gradients is also asked for by itself."""
    return OpUnderTest(
        name=name,
        choices={
            # Tokens of a block, and columns of a tile. An NPU's block has as many tokens as the
            # second number.
            "tile": (None, (1, 16), (4, 16), (8, 64)), "tmax": (4, 1, 2, 3, 5, 12),
            # The dtype of h_pre, h_post and h_res, or of phi, b and the alphas.
            "other_dtype": (FP32, SAME), "f_dtype": (SAME, FP32), "rms_eps": (1e-6, 1e-2),
            "pre_eps": (0.01, 0.0, 0.1), "sinkhorn_eps": (1e-6, 1e-2, 0.0),
            "post_mult": (2.0, 1.0, -2.0),
            # The deviation of the logits, about, and the mean of b.
            "sharpness": (1.0, 0.1, 4.0), "b_shift": (0.0,),
        },
        coupled=streams,
        tensors=tensors,
        sample_shape=lambda rows: (rows, 2, 2, 7),
        sampled={"other_dtype": SAME},
        cases=cases,
        forms=Forms(
            shapes=shapes(*((ROWS, hc, C) for hc, C in sizes)),
            options=({"other_dtype": BF16},),
            backward_options=[
                {"output_mask": tuple(wanted == i for wanted in range(6))} for i in range(alone)
            ],
            counted={0: {"shape": (3, *LAUNCHED[0])}},
            executed=(
                {"shape": (5, 3, 100), "tile": (4, 32)}, {"shape": (7, 4, 300)},
                {"shape": (3, 1, 33)},
            ),
            common={"other_dtype": SAME},
        ),
        compiled=shapes((4, 4, 4096), (4, 64, 64), other_dtype=FP32, tmax=20),
        autocast_as=autocast_as,
        **more,
    )  # fmt: skip


def has_tokens(case: Any) -> bool:
    """Return whether the first dimension is of tokens, and not of streams."""
    return len(case.shape) > 2


def wide(C: int, **more: Any) -> Fields:
    return {"shape": (2, 4, C), "dtype": BF16, "layout": "sliced", **more}


OPS = (
    hyper_connection(
        "mhc_pre", 2, MANY, pre_tensors,
        {
            "wide": wide(5001),
            "17-streams": {"shape": (3, 17, 301), "dtype": torch.float16},
            "64-streams": {"shape": (2, 64, 130), "dtype": FP32},
        },
        "mul.Tensor",
        rows_permute=has_tokens,
        output_magnitudes=lambda c, t: [c.shape[-2] * max_abs(t["h_pre"]) * max_abs(t["x"])],
        gradient_magnitudes=pre_gradient_magnitudes,
    ),
    hyper_connection(
        "mhc_post_res", 3, MANY, post_res_tensors,
        {"wide": wide(3001), "17-streams": {"shape": (2, 17, 301), "dtype": torch.float16}},
        "bmm",
        rows_permute=has_tokens,
        output_magnitudes=post_res_magnitudes,
        gradient_magnitudes=post_res_gradient_magnitudes,
        multiplies=True,
    ),
    # The backward also runs without the gradients of b and the alphas.
    hyper_connection(
        "mhc_coeffs_forward", 1, LAUNCHED, coeffs_tensors,
        {
            "wide": wide(2501, tmax=20),
            # Some blocks of tokens, by the host code's own plan.
            "tokens": {"shape": (70, 4, 16), "dtype": FP32, "tmax": 20, "other_dtype": BF16},
            "16-streams": {"shape": (5, 16, 3), "dtype": BF16, "tmax": 7},
            "33-streams": {"shape": (3, 33, 2), "dtype": FP32, "tmax": 3},
            # Logits so large that most probabilities are 0 or 1.
            "sharp": {"shape": (6, 4, 16), "dtype": FP32, "tmax": 20, "sharpness": 50.0},
            # A tile for three streams has logits of a fourth, which must not be the largest.
            "logits-far-below-0": {"shape": (5, 3, 8), "dtype": FP32, "b_shift": -200.0},
            "iterations": {"shape": (3, 3, 8), "dtype": FP32, "tmax": 75, "sharpness": 2.0},
            "no-tokens": {"shape": (0, 4, 16), "dtype": FP32},
        },
        "linear",
        # PyTorch computes the products of the rows.
        rows_permute=lambda case: False,
        output_magnitudes=coeffs_magnitudes,
        gradient_magnitudes=coeffs_gradient_magnitudes,
        multiplies=True,
        # Its coefficients are computed in the dtypes of their tensors.
        autocast_keeps=INPUTS,
    ),
)  # fmt: skip
