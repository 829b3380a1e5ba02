"""The activations under test."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from launch_forms import BF16, COUNTED_ROWS, FP32, ROWS, WIDTHS, Fields, Forms, masks, shapes, tiled
from liger_ops import library
from op_under_test import SAME, OpUnderTest, Pick, Tensors, Values, drawn_for, drawn_rows, laid_out

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


# The magnitudes of the terms of an activation with its scalars, of its slope, and of their factor
# from up. The relative error of exp(z) is z times that of z, which gives the factors 1 + |z|.
Terms = tuple[Tensor, Tensor, Tensor]


def sigmoid_terms(
    value: Tensor, z: Tensor, derivative: Tensor, factor: Tensor, scale: float = 1.0
) -> Terms:
    """Return the terms of value * sigmoid(z) * factor; `derivative` is value * dz / dvalue, and
    `scale` is the derivative of value."""
    sigmoid = torch.sigmoid(z)
    slope = sigmoid * (1 + derivative.abs() * (1 - sigmoid)) * (1 + z.abs()) * abs(scale)
    return value.abs() * (sigmoid * (1 + z.abs()) + TINY), slope + TINY, factor.abs()


def swiglu_terms(case: Any, gate: Tensor, up: Tensor) -> Terms:
    value = gate * case.gate_multiplier
    z, down = value.clamp(-1000, 1000), abs(case.down_multiplier)
    activation, slope, factor = sigmoid_terms(value, z, z, up, case.gate_multiplier)
    return activation * down, slope * down, factor


def geglu_terms(case: Any, gate: Tensor, up: Tensor) -> Terms:
    if case.approximate == "none":
        density = gate.square().mul(-0.5).exp() / math.sqrt(2 * math.pi)
        slope = 1 + gate.abs() * density * (1 + gate.square())
        return gate.abs(), slope, up.abs()
    near = gate.clamp(-30, 30)
    z = math.sqrt(8 / math.pi) * (near + 0.044715 * near**3)
    derivative = near * math.sqrt(8 / math.pi) * (1 + 0.134145 * near**2)
    return sigmoid_terms(gate, z, derivative, up)


def clamped_swiglu_terms(case: Any, gate: Tensor, up: Tensor) -> Terms:
    value = gate.clamp(max=case.limit)
    z = (value * case.alpha).clamp(-1000, 1000)
    factor = up.clamp(-case.limit, case.limit).abs() + abs(case.up_offset)
    return sigmoid_terms(value, z, z, factor)


def gated_output_magnitudes(terms: Any, form: str, case: Any, tensors: Tensors) -> list[Tensor]:
    activation, _, factor = terms(case, *apart(tensors["gate"], tensors["up"], form))
    return [activation * factor + TINY]


def gated_gradient_magnitudes(terms: Any, form: str, case: Any, tensors: Tensors) -> list[Tensor]:
    activation, slope, factor = terms(case, *apart(tensors["gate"], tensors["up"], form))
    dy = tensors["dy"].double().abs()
    return together(dy * slope * factor + TINY, dy * activation + TINY, form)


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


def gated(
    name: str, terms: Callable[[Any, Tensor, Tensor], Terms], *options: Fields,
    sampled: Fields | None = None, **choices: Sequence[Any],
) -> list[OpUnderTest]:  # fmt: skip
    """Return the entries of a gated activation: of separate tensors, of halves of one tensor and,
    if the op has them, of interleaved columns. `choices` are the op's scalars, and `options` their
    values that have kernels of their own."""
    interleaved = "interleaved" in library.OPS[name].arguments._fields
    forms = ("", "packed", "interleaved")[: 2 + interleaved]
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
            output_magnitudes=partial(gated_output_magnitudes, terms, form),
            gradient_magnitudes=partial(gated_gradient_magnitudes, terms, form),
            sampled=sampled or {},
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
        "swiglu", swiglu_terms, {"up_dtype": FP32},
        sampled={"gate_multiplier": 0.7, "down_multiplier": 1.3},
        gate_multiplier=(1.0, 0.5, -0.3), down_multiplier=(1.0, 0.088, -1.0),
    ),
    *gated("geglu", geglu_terms, {"approximate": "none"}, approximate=("tanh", "none")),
    *gated(
        "clamped_swiglu", clamped_swiglu_terms, sampled={"limit": 0.8},
        alpha=(1.702, 1.0, -0.7), limit=(7.0, 0.5, float("inf")), up_offset=(1.0, 0.0, -1.0),
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
