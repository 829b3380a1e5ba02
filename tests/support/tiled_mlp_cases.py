"""tiled_mlp under test, in the form of tiled_mlp_forward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from op_under_test import Case, OpUnderTest, Tensors, Values


@dataclass(frozen=True, kw_only=True)
class TiledMLPCase(Case):
    """shape is x's."""

    intermediate: int = 7
    out: int = 6
    bias: bool = True
    activation: str = "silu"
    tile_rows: int | None = 2
    output_mask: tuple[bool, ...] = (True,) * 7


WEIGHTS = ("gate_weight", "up_weight", "down_weight")
BIASES = ("gate_bias", "up_bias", "down_bias")
INPUTS = ("x", *WEIGHTS, *BIASES)


def tensors(case: TiledMLPCase) -> Tensors:
    values = Values(case.seed)
    D, I, O = case.shape[-1], case.intermediate, case.out
    bias_dtype = case.dtype if case.bias else None
    return {
        "x": values.draw(case.shape, case.dtype, case.layout, case.scale),
        "gate_weight": values.draw((I, D), case.dtype, scale=D**-0.5),
        "up_weight": values.draw((I, D), case.dtype, scale=D**-0.5),
        "down_weight": values.draw((O, I), case.dtype, scale=I**-0.5),
        "gate_bias": values.draw((I,), bias_dtype),
        "up_bias": values.draw((I,), bias_dtype),
        "down_bias": values.draw((O,), bias_dtype),
        "dy": values.draw((*case.shape[:-1], O), case.dtype, case.dy_layout),
    }


def forward_args(case: TiledMLPCase, tensors: Tensors) -> tuple[Any, ...]:
    return (*(tensors[name] for name in INPUTS), case.activation, case.tile_rows)


def backward_args(case: TiledMLPCase, tensors: Tensors) -> tuple[Any, ...]:
    return (tensors["dy"], *forward_args(case, tensors), list(case.output_mask))


def sample(dtype: torch.dtype = torch.float64, rows: int = 3, **form: Any) -> TiledMLPCase:
    """Several tiles. All sizes differ, because tracing would treat equal ones as one size."""
    return TiledMLPCase(**{"shape": (rows, 2, 4), "dtype": dtype, **form})


OPS = (
    # tests/ops/test_tiled_mlp.py checks its kernels with bounds of their own.
    OpUnderTest(
        name="tiled_mlp_forward",
        tensors=tensors,
        forward_args=forward_args,
        backward_args=backward_args,
        gradients_of=INPUTS,
        output_magnitudes=lambda case, tensors: [],
        gradient_magnitudes=lambda case, tensors: [],
        sample=sample,
        per_row=("x", "dy"),
        leading=("x",),
        multiplies=True,
        autocast_as="linear",
    ),
)
