"""The activations under test."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from launch_forms import BF16, COUNTED_ROWS, FP32, ROWS, WIDTHS, Fields, Forms, masks, shapes, tiled
from op_under_test import (
    SAME,
    OpUnderTest,
    Pick,
    Tensors,
    Values,
    drawn_for,
    drawn_rows,
    laid_out,
)

# Below this, float32 exp and products underflow.
TINY = torch.finfo(torch.float32).tiny
# Values where exp or its square leaves float32's range, and where an activation is flat or linear.
SPECIAL = (1e4, -1e4, 88.0, -88.0, -104.0, 20.0, -20.0, -1.278, 0.0, 1e-7, -1e-30)
HUGE = (3e38, -3e38, 1e20, -1e20)


def gate_like(case: Any, values: Values, shape: tuple[int, ...]) -> Tensor:
    """Draw a tensor whose first columns are the special values of the case."""
    gate = values.draw(shape, SAME, case.layout, case.scale)
    if gate.numel() > 0:
        for i, special in enumerate(case.special[: shape[-1]]):
            gate[..., i] = special
    return gate


def gated_tensors(case: Any, form: str) -> Tensors:
    """Draw gate, up and dy. With a form, gate holds both, packed or interleaved, and up is None."""
    values, up_dtype = drawn_for(case), SAME if form else case.up_dtype
    gate = gate_like(case, values, case.shape)
    up = values.draw(case.shape, up_dtype, case.layout, case.scale)
    dy = values.draw(case.shape, torch.promote_types(gate.dtype, up.dtype), case.dy_layout)
    if not form:
        return {"gate": gate, "up": up, "dy": dy}
    packed = torch.stack((gate, up), -1 if form == "interleaved" else -2).flatten(-2)
    return {"gate": laid_out(packed, case.layout), "up": None, "dy": dy}


def apart(gate: Tensor, up: Tensor | None, form: str) -> tuple[Tensor, Tensor]:
    """Return gate and up in float64, taken out of one tensor if the form packs them."""
    if form == "interleaved":
        gate, up = gate[..., ::2], gate[..., 1::2]
    elif form:
        gate, up = gate.chunk(2, -1)
    return gate.double(), up.double()


def together(dgate: Tensor, dup: Tensor, form: str) -> list[Tensor]:
    """Return the gradients as the form has them: the inverse of `apart`."""
    if form:
        return [torch.stack((dgate, dup), -1 if form == "interleaved" else -2).flatten(-2)]
    return [dgate, dup]


def terms(op: str, case: Any, gate: Tensor, up: Tensor) -> tuple[Tensor, ...]:
    """Compute the magnitudes of the terms of the activation and its slope, and of their factors
    from up.

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


def gated_output_magnitudes(op: str, form: str, case: Any, tensors: Tensors) -> list[Tensor]:
    gate, up = apart(tensors["gate"], tensors["up"], form)
    activation, _, factor, _ = terms(op, case, gate, up)
    return [activation * factor + TINY]


def gated_gradient_magnitudes(op: str, form: str, case: Any, tensors: Tensors) -> list[Tensor]:
    gate, up = apart(tensors["gate"], tensors["up"], form)
    activation, slope, factor, _ = terms(op, case, gate, up)
    dy = tensors["dy"].double().abs()
    scale = abs(case.down_multiplier) if op == "swiglu" else 1.0
    return together(dy * slope * factor + TINY, dy * activation * scale + TINY, form)


def unary_tensors(case: Any) -> Tensors:
    values = drawn_for(case)
    x = gate_like(case, values, case.shape)
    return {"x": x, "dy": values.draw(case.shape, SAME, case.dy_layout)}


def special_rows(pick: Pick, fields: Fields) -> Fields:
    """Draw rows whose first elements are values that a normal distribution does not produce."""
    special = SPECIAL if fields["dtype"] is torch.float16 else SPECIAL + HUGE
    drawn = tuple(pick(special) for _ in range(pick(range(5))))
    return {**drawn_rows(pick, fields), "special": drawn}


# 5 x 4096 x 131072 elements exceed int32. Rows of SLICED tensors start at any address.
SHAPES = shapes(*((ROWS, N) for N in WIDTHS), (5 * ROWS, 131072))
SLICED = {"layout": "sliced", "dy_layout": "sliced"}


def described(name: str, form: str, choices: Fields, *options: Fields, **more: Any) -> OpUnderTest:
    return OpUnderTest(
        name=name,
        form=form,
        choices={"special": ((),), "scale": (1.0, 1e-3, 10.0), **choices},
        coupled=special_rows,
        elementwise=True,
        sample_shape=lambda rows: (rows, 2, 6),
        cases={
            f"{N}-{layout}": {"shape": (3, N), "dtype": BF16, "layout": layout}
            for N, layout in ((14336, "contiguous"), (20011, "sliced"))
        },
        forms=Forms(
            shapes=SHAPES,
            options=(SLICED, *options),
            backward_options=masks(2) if choices and not form else (),
            # The widths 1023 and 4096.
            optional_at=(3, 4),
            counted=COUNTED_ROWS,
            executed=tiled(),
        ),
        **more,
    )


def gated(name: str, choices: Fields, sampled: Fields, *options: Fields) -> list[OpUnderTest]:
    """Return the entries of a gated activation: of separate tensors, of halves of one tensor and,
    if the op has them, of interleaved columns."""
    forms = ("", "packed", "interleaved")[: 2 + (name == "clamped_swiglu")]
    return [
        described(
            name,
            form,
            {"up_dtype": (SAME, FP32), **choices},
            *(option for option in options if not (form and "up_dtype" in option)),
            tensors=partial(gated_tensors, form=form),
            computed={
                "interleaved": lambda c, t, form=form: form == "interleaved",
                "output_mask": lambda c, t, form=form: [
                    c.output_mask[0], c.output_mask[1] and not form,
                ],
            },
            output_magnitudes=partial(gated_output_magnitudes, name, form),
            gradient_magnitudes=partial(gated_gradient_magnitudes, name, form),
            sampled=sampled,
            compiled=[
                {**shape, **option}
                for shape in shapes((4, 100), (4, 4096))
                for option in ({}, *options)
                if "up_dtype" not in option
            ],
            autocast_as="gelu" if name == "geglu" else "silu",
        )
        for form in forms
    ]  # fmt: skip


OPS = (
    *gated(
        "swiglu",
        {"gate_multiplier": (1.0, 0.5, -0.3), "down_multiplier": (1.0, 0.088, -1.0)},
        {"gate_multiplier": 0.7, "down_multiplier": 1.3},
        {"up_dtype": FP32},
    ),
    *gated("geglu", {"approximate": ("tanh", "none")}, {}, {"approximate": "none"}),
    *gated(
        "clamped_swiglu",
        {
            "alpha": (1.702, 1.0, -0.7), "limit": (7.0, 0.5, float("inf")),
            "up_offset": (1.0, 0.0, -1.0),
        },
        {"limit": 0.8},
    ),
    described(
        "relu_squared",
        "",
        {},
        tensors=unary_tensors,
        output_magnitudes=lambda c, t: [t["x"].double().square() + TINY],
        gradient_magnitudes=lambda c, t: [(t["x"].double() * t["dy"].double()).abs() + TINY],
        compiled=shapes((4, 100), (4, 4096)),
        autocast_as="relu",
    ),
)  # fmt: skip
