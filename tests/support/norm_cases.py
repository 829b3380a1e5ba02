"""The norms under test."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from op_under_test import Case, OpUnderTest, Tensors, Values, max_abs


@dataclass(frozen=True, kw_only=True)
class NormCase(Case):
    weight_dtype: torch.dtype | None = None
    bias_dtype: torch.dtype | None = None
    residual_dtype: torch.dtype | None = None
    eps: float = 1e-6
    offset: float = 0.0
    casting_mode: str = "llama"
    num_groups: int = 1
    has_ds: bool = True


def tensors(case: NormCase, parameter_dim: int = -1, has_sum: bool = False) -> Tensors:
    """x, weight, bias, residual, dy, ds on the device under test."""
    columns = (case.shape[parameter_dim],)
    values = Values(case.seed)
    s_dtype = case.dtype
    if has_sum and case.residual_dtype is not None:
        s_dtype = torch.promote_types(case.dtype, case.residual_dtype)
    return {
        "x": values.draw(case.shape, case.dtype, case.layout, case.scale, case.shift),
        "weight": values.draw(columns, case.weight_dtype),
        "bias": values.draw(columns, case.bias_dtype),
        "residual": values.draw(case.shape, case.residual_dtype, case.layout),
        "dy": values.draw(case.shape, s_dtype, case.dy_layout),
        "ds": values.draw(case.shape, s_dtype if case.has_ds else None, case.layout),
    }


def the_sum_as_stored(case: NormCase, tensors: Tensors) -> Tensors:
    s = tensors["x"] + tensors["residual"]
    return {**tensors, "x": s, "residual": torch.zeros_like(s)}


def magnitudes(op: str, case: NormCase, tensors: Tensors) -> tuple[float, float]:
    """The magnitudes of the outputs, and of dx."""
    x = tensors["x"].double()
    if op == "fused_add_rms_norm":
        x = x + tensors["residual"].double()
    if x.numel() == 0:
        return 0.0, 0.0
    if op == "group_norm":
        groups = x.reshape(x.shape[0], case.num_groups, -1)
        variance = groups.var(-1, unbiased=False)
    elif op == "layer_norm":
        variance = x.var(-1, unbiased=False)
    else:
        variance = x.square().mean(-1)
    rstd = (variance + case.eps).rsqrt().max()
    scale = max_abs(tensors["weight"], 1.0) + abs(case.offset)
    normalised = rstd * x.abs().max()
    gradient = rstd * max_abs(tensors["dy"]) * scale * (1 + normalised)
    return float(normalised * scale), float(gradient)


def output_magnitudes(op: str, case: NormCase, tensors: Tensors) -> list[float]:
    forward, _ = magnitudes(op, case, tensors)
    return [forward] * (2 if op == "fused_add_rms_norm" else 1)


def gradient_magnitudes(
    op: str, parameter_dim: int, case: NormCase, tensors: Tensors
) -> list[float]:
    """The magnitudes of dx, dweight and dbias; the last two are sums over all rows."""
    x, dy = tensors["x"], tensors["dy"]
    if x.numel() == 0:
        return [0.0, 0.0, 0.0]
    _, gradient = magnitudes(op, case, tensors)
    normalised, _ = magnitudes(op, replace(case, offset=0.0), {**tensors, "weight": None})
    terms = float(dy.double().abs().sum() / x.shape[parameter_dim])
    return [gradient, terms * (1 + normalised), terms]


def sample(
    dtype: torch.dtype = torch.float64,
    rows: int = 3,
    shape: tuple[int, ...] = (2, 7),
    num_groups: int = 1,
    **form: Any,
) -> NormCase:
    return NormCase(
        shape=(rows, *shape),
        dtype=dtype,
        weight_dtype=dtype,
        bias_dtype=dtype,
        residual_dtype=dtype,
        num_groups=num_groups,
        **form,
    )


def norm(name: str, *, parameter_dim: int = -1, **fields: Any) -> OpUnderTest:
    defaults = {
        "tensors": partial(tensors, parameter_dim=parameter_dim),
        "output_magnitudes": partial(output_magnitudes, name),
        "gradient_magnitudes": partial(gradient_magnitudes, name, parameter_dim),
        "sample": sample,
        "per_row": ("x", "residual", "dy", "ds"),
        "leading": ("x", "s"),
        "autocast_as": name.removeprefix("fused_add_"),
    }
    return OpUnderTest(name=name, **{**defaults, **fields})


OPS = (
    norm(
        "rms_norm",
        forward_args=lambda c, t: (t["x"], t["weight"], c.eps, c.offset, c.casting_mode),
        backward_args=lambda c, t: (
            t["dy"],
            t["x"],
            t["weight"],
            c.eps,
            c.offset,
            list(c.output_mask[:2]),
        ),
        gradients_of=("x", "weight"),
    ),
    norm(
        "fused_add_rms_norm",
        tensors=partial(tensors, has_sum=True),
        forward_args=lambda c, t: (
            t["x"],
            t["residual"],
            t["weight"],
            c.eps,
            c.offset,
            c.casting_mode,
        ),
        backward_args=lambda c, t: (
            t["dy"],
            t["ds"],
            t["x"] + t["residual"],
            t["weight"],
            c.eps,
            c.offset,
            list(c.output_mask[:2]),
        ),
        gradients_of=("x", "weight"),
        gradients_from=("dy", "ds"),
        seen_by_backward=the_sum_as_stored,
    ),
    norm(
        "layer_norm",
        forward_args=lambda c, t: (t["x"], t["weight"], t["bias"], c.eps),
        backward_args=lambda c, t: (
            t["dy"],
            t["x"],
            t["weight"],
            t["bias"],
            c.eps,
            list(c.output_mask),
        ),
        gradients_of=("x", "weight", "bias"),
    ),
    norm(
        "group_norm",
        parameter_dim=1,
        forward_args=lambda c, t: (t["x"], c.num_groups, t["weight"], t["bias"], c.eps),
        backward_args=lambda c, t: (
            t["dy"],
            t["x"],
            c.num_groups,
            t["weight"],
            t["bias"],
            c.eps,
            list(c.output_mask),
        ),
        gradients_of=("x", "weight", "bias"),
        sample=partial(sample, shape=(6, 5), num_groups=3),
    ),
)
