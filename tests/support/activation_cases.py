"""The activations under test."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from op_under_test import Case, OpUnderTest, Tensors, Values, laid_out

# Below this, float32 exp and products underflow.
TINY = torch.finfo(torch.float32).tiny

Options = Callable[["ActivationCase"], tuple[Any, ...]]


@dataclass(frozen=True, kw_only=True)
class ActivationCase(Case):
    up_dtype: torch.dtype | None = None
    # The first elements of gate, or of x: values that a normal distribution does not produce.
    special: tuple[float, ...] = ()
    gate_multiplier: float = 1.0
    down_multiplier: float = 1.0
    approximate: str = "tanh"
    alpha: float = 1.702
    limit: float = 7.0
    up_offset: float = 1.0


def gate_like(case: ActivationCase, values: Values, shape: tuple[int, ...]) -> Tensor:
    gate = values.draw(shape, case.dtype, case.layout, case.scale, case.shift)
    if gate.numel() > 0:
        for i, special in enumerate(case.special[: shape[-1]]):
            gate[..., i] = special
    return gate


def gated_tensors(case: ActivationCase, form: str) -> Tensors:
    """gate, up and dy; if up is None, gate holds both."""
    values = Values(case.seed)
    up_dtype = case.up_dtype if not form and case.up_dtype else case.dtype
    gate, up = (
        gate_like(case, values, case.shape),
        values.draw(case.shape, up_dtype, case.layout, case.scale),
    )
    dy_dtype = torch.promote_types(case.dtype, up_dtype)
    dy = values.draw(case.shape, dy_dtype, case.dy_layout)
    if not form:
        return {"gate": gate, "up": up, "dy": dy}
    packed = torch.stack((gate, up), -1 if form == "interleaved" else -2).flatten(-2)
    return {"gate": laid_out(packed, case.layout), "up": None, "dy": dy}


def apart(gate: Tensor, up: Tensor | None, form: str) -> tuple[Tensor, Tensor]:
    if form == "interleaved":
        gate, up = gate[..., ::2], gate[..., 1::2]
    elif form:
        gate, up = gate.chunk(2, -1)
    return gate.double(), up.double()


def together(dgate: Tensor, dup: Tensor, form: str) -> list[Tensor]:
    if form:
        return [torch.stack((dgate, dup), -1 if form == "interleaved" else -2).flatten(-2)]
    return [dgate, dup]


def terms(op: str, case: ActivationCase, gate: Tensor, up: Tensor) -> tuple[Tensor, ...]:
    """Magnitudes of the terms of the activation and of its slope, and of their factors from up.

    The relative error of exp(z) is z times that of z, hence the factors 1 + |z|.
    """
    if op == "geglu" and case.approximate == "none":
        density = gate.square().mul(-0.5).exp() / math.sqrt(2 * math.pi)
        slope = 1 + gate.abs() * density * (1 + gate.square())
        return gate.abs(), slope, up.abs(), torch.ones_like(up)
    if op == "geglu":
        near = gate.clamp(-30, 30)
        z = math.sqrt(8 / math.pi) * (near + 0.044715 * near**3)
        derivative = near * math.sqrt(8 / math.pi) * (1 + 0.134145 * near**2)
        value, factor, slope_factor = gate, up, 1.0
    elif op == "swiglu":
        value = gate * case.gate_multiplier
        z = derivative = value.clamp(-1000, 1000)
        factor, slope_factor = up * case.down_multiplier, case.gate_multiplier
    else:
        value = gate.clamp(max=case.limit)
        z = derivative = (value * case.alpha).clamp(-1000, 1000)
        factor = up.clamp(-case.limit, case.limit).abs() + abs(case.up_offset)
        slope_factor = 1.0
    sigmoid = torch.sigmoid(z)
    slope = sigmoid * (1 + derivative.abs() * (1 - sigmoid)) * (1 + z.abs()) * abs(slope_factor)
    activation = value.abs() * (sigmoid * (1 + z.abs()) + TINY)
    return activation, slope + TINY, factor.abs(), factor / up


def gated_output_magnitudes(
    op: str, form: str, case: ActivationCase, tensors: Tensors
) -> list[Tensor]:
    gate, up = apart(tensors["gate"], tensors["up"], form)
    activation, _, factor, _ = terms(op, case, gate, up)
    return [activation * factor + TINY]


def gated_gradient_magnitudes(
    op: str, form: str, case: ActivationCase, tensors: Tensors
) -> list[Tensor]:
    gate, up = apart(tensors["gate"], tensors["up"], form)
    activation, slope, factor, _ = terms(op, case, gate, up)
    dy = tensors["dy"].double().abs()
    scale = abs(case.down_multiplier) if op == "swiglu" else 1.0
    return together(dy * slope * factor + TINY, dy * activation * scale + TINY, form)


def sample(
    dtype: torch.dtype = torch.float64, rows: int = 3, limit: float = 0.8, **form: Any
) -> ActivationCase:
    return ActivationCase(
        shape=(rows, 2, 6),
        dtype=dtype,
        gate_multiplier=0.7,
        down_multiplier=1.3,
        limit=limit,
        **form,
    )


def gated(name: str, options: Options, form: str = "") -> OpUnderTest:
    mask = lambda case: [case.output_mask[0], case.output_mask[1] and not form]
    return OpUnderTest(
        name=name,
        form=form,
        tensors=partial(gated_tensors, form=form),
        forward_args=lambda c, t: (t["gate"], t["up"], *options(c)),
        backward_args=lambda c, t: (t["dy"], t["gate"], t["up"], *options(c), mask(c)),
        gradients_of=("gate", "up"),
        output_magnitudes=partial(gated_output_magnitudes, name, form),
        gradient_magnitudes=partial(gated_gradient_magnitudes, name, form),
        elementwise=True,
        sample=sample,
        per_row=("gate", "up", "dy"),
        leading=("gate",),
        autocast_as="gelu" if name == "geglu" else "silu",
    )


def swiglu_options(case: ActivationCase) -> tuple[Any, ...]:
    return case.gate_multiplier, case.down_multiplier


def geglu_options(case: ActivationCase) -> tuple[Any, ...]:
    return (case.approximate,)


def clamped_options(interleaved: bool, case: ActivationCase) -> tuple[Any, ...]:
    return case.alpha, case.limit, case.up_offset, interleaved


def unary_tensors(case: ActivationCase) -> Tensors:
    values = Values(case.seed)
    return {
        "x": gate_like(case, values, case.shape),
        "dy": values.draw(case.shape, case.dtype, case.dy_layout),
    }


OPS = (
    gated("swiglu", swiglu_options),
    gated("swiglu", swiglu_options, "packed"),
    gated("geglu", geglu_options),
    gated("geglu", geglu_options, "packed"),
    gated("clamped_swiglu", partial(clamped_options, False)),
    gated("clamped_swiglu", partial(clamped_options, False), "packed"),
    gated("clamped_swiglu", partial(clamped_options, True), "interleaved"),
    OpUnderTest(
        name="relu_squared",
        tensors=unary_tensors,
        forward_args=lambda c, t: (t["x"],),
        backward_args=lambda c, t: (t["dy"], t["x"]),
        gradients_of=("x",),
        output_magnitudes=lambda c, t: [t["x"].double().square() + TINY],
        gradient_magnitudes=lambda c, t: [(t["x"].double() * t["dy"].double()).abs() + TINY],
        elementwise=True,
        sample=sample,
        per_row=("x", "dy"),
        leading=("x",),
        autocast_as="relu",
    ),
)
