"""modulated_rms_norm and modulated_layer_norm under test, with a scale of each form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch

import norm_cases
from norm_cases import NormCase
from op_under_test import OpUnderTest, Tensors, Values, max_abs


@dataclass(frozen=True, kw_only=True)
class ModulatedCase(NormCase):
    scale_dtype: torch.dtype | None = None
    shift_dtype: torch.dtype | None = None
    output_mask: tuple[bool, ...] = (True,) * 5


# The shape of scale, by the form of the op and x's shape.
SCALES: dict[str, Callable[[tuple[int, ...]], tuple[int, ...]]] = {
    "": lambda shape: shape[-1:],
    "sample": lambda shape: (*shape[:-1][:1], shape[-1]),
    "token": lambda shape: shape,
}


def tensors(form: str, case: ModulatedCase) -> Tensors:
    values = Values(case.seed + 1)
    shape = SCALES[form](case.shape)
    layout = case.layout if form == "token" else "contiguous"
    return {
        **norm_cases.tensors(case),
        "scale": values.draw(shape, case.scale_dtype or case.dtype, layout, 0.5),
        "shift": values.draw(shape, case.shift_dtype, layout),
    }


def magnitudes(name: str, case: ModulatedCase, tensors: Tensors) -> tuple[float, float, float]:
    """The magnitudes of norm(x), y and dx."""
    plain = name.removeprefix("modulated_")
    normalised, gradient = norm_cases.magnitudes(plain, case, tensors)
    normalised += max_abs(tensors["bias"])
    factor = 1 + max_abs(tensors["scale"])
    return normalised, normalised * factor + max_abs(tensors["shift"]), gradient * factor


def gradient_magnitudes(name: str, case: ModulatedCase, tensors: Tensors) -> list[float]:
    normalised, _, gradient = magnitudes(name, case, tensors)
    dy, scale = tensors["dy"], tensors["scale"]
    if dy.numel() == 0:
        return [0.0] * 5
    columns = dy.shape[-1]
    terms = float(dy.double().abs().sum() / columns)
    rows = dy.double().abs().reshape(scale.numel() // columns, -1, columns)
    of_sample = float(rows.sum(1).max())
    factor = 1 + max_abs(scale)
    xhat, _ = norm_cases.magnitudes(
        name.removeprefix("modulated_"), case, {**tensors, "weight": None}
    )
    return [
        gradient,
        of_sample * (1 + normalised),
        of_sample,
        terms * factor * (1 + xhat),
        terms * factor,
    ]


def sample(
    has_bias: bool, dtype: torch.dtype = torch.float64, rows: int = 3, **form: Any
) -> ModulatedCase:
    return ModulatedCase(
        shape=(rows, 2, 7),
        dtype=dtype,
        weight_dtype=dtype,
        bias_dtype=dtype if has_bias else None,
        scale_dtype=dtype,
        shift_dtype=dtype,
        **form,
    )


def described(name: str, form: str) -> OpUnderTest:
    is_rms = name == "modulated_rms_norm"
    inputs = ("x", "scale", "shift", "weight", *(() if is_rms else ("bias",)))
    modes = {} if is_rms else {"llama": "torch"}

    def options(case: ModulatedCase) -> tuple[float, ...]:
        return (case.eps, case.offset) if is_rms else (case.eps,)

    return OpUnderTest(
        name=name,
        form=form,
        tensors=partial(tensors, form),
        forward_args=lambda c, t: (
            *(t[one] for one in inputs),
            *options(c),
            modes.get(c.casting_mode, c.casting_mode),
        ),
        backward_args=lambda c, t: (
            *(t[one] for one in ("dy", *inputs)),
            *options(c),
            list(c.output_mask[: len(inputs)]),
        ),
        gradients_of=inputs,
        output_magnitudes=lambda c, t: [magnitudes(name, c, t)[1]],
        gradient_magnitudes=partial(gradient_magnitudes, name),
        sample=partial(sample, not is_rms),
        per_row=("x", "dy", *(("scale", "shift") if form else ())),
        leading=("x", "scale"),
        autocast_as="rms_norm" if is_rms else "layer_norm",
        autocast_keeps=("scale", "shift"),
    )


OPS = tuple(
    described(name, form)
    for name in ("modulated_rms_norm", "modulated_layer_norm")
    for form in SCALES
)


def modulated(case: NormCase, **more: Any) -> ModulatedCase:
    """A case of a norm, with a modulation."""
    return ModulatedCase(**{**{f.name: getattr(case, f.name) for f in fields(case)}, **more})
