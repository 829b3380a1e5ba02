"""gated_rms_norm under test."""

from __future__ import annotations

from typing import Any

import torch

from launch_forms import FP32, Fields, Forms, masks, rows
from launch_forms import ROWS as MANY
from norm_cases import (
    COMPILED,
    DX_ALONE,
    EPS,
    FP32_WEIGHTED,
    PARAMETER,
    WEIGHTED,
    WEIGHTLESS,
    ZERO_EPS,
    wide,
)
from op_under_test import SAME, SIZES, OpUnderTest, Pick, Tensors, drawn_for, leading_shape, max_abs


def tensors(case: Any) -> Tensors:
    values = drawn_for(case)
    return {
        "x": values.draw(case.shape, SAME, case.layout, case.scale),
        "gate": values.draw(case.shape, case.gate_dtype, case.layout, 2.0),
        "weight": values.draw(case.shape[-1:], case.weight_dtype),
        "dy": values.draw(case.shape, SAME, case.dy_layout),
    }


def groups(pick: Pick, fields: Fields) -> Fields:
    tile, count = fields["tile"], fields["num_groups"]
    sizes = [n for n in SIZES if count * n <= (5 * tile[1] if tile else 1021)]
    return {"shape": (*leading_shape(pick), count * pick(sizes))}


def group_size(case: Any, tensors: Tensors) -> int | None:
    return None if case.num_groups == 1 else case.shape[-1] // case.num_groups


def magnitudes(case: Any, tensors: Tensors) -> tuple[float, float, float, float]:
    """Return the magnitudes of y, dx, dgate, and of a factor of the terms of dweight."""
    x, gate = (tensors[name].double() for name in ("x", "gate"))
    if x.numel() == 0:
        return 0.0, 0.0, 0.0, 0.0
    a = torch.sigmoid(gate) * (gate if case.activation == "silu" else 1.0)
    s = x if case.norm_before_gate else x * a
    groups = s.reshape(*s.shape[:-1], case.num_groups, -1)
    rstd = float((groups.square().mean(-1) + case.eps).rsqrt().max())
    scale = max_abs(tensors["weight"], 1.0)
    most = float(a.abs().max())
    before = most if case.norm_before_gate else 1.0
    normalised = rstd * float(s.abs().max())
    gradient = rstd * max_abs(tensors["dy"]) * scale * (1 + normalised)
    # The slopes of both activations are at most 1.1.
    dgate = 1.1 * gradient * (1 + float(x.abs().max()))
    return normalised * scale * before, gradient * most, dgate, before * (1 + normalised)


def gradient_magnitudes(case: Any, tensors: Tensors) -> list[float]:
    _, dx, dgate, factor = magnitudes(case, tensors)
    x, dy = tensors["x"], tensors["dy"]
    terms = float(dy.double().abs().sum() / x.shape[-1]) if x.numel() else 0.0
    return [dx, dgate, terms * factor]


def grouped(*sizes: tuple[tuple[int, ...], int], **fields: Any) -> tuple[Fields, ...]:
    return tuple({"shape": shape, "num_groups": groups, **fields} for shape, groups in sizes)


# Groups of columns: narrow, as in Mamba 2 and Zamba2, one group, and groups that fit no tile.
GROUPED = Forms(
    shapes=grouped(
        *(
            ((MANY, N), groups)
            for N, groups in ((24, 3), (1024, 8), (8192, 8), (4096, 1), (8192, 1), (28672, 2))
        )
    ),
    options=({"casting_mode": "gemma"}, FP32_WEIGHTED),
    backward_options=({**WEIGHTLESS, **DX_ALONE}, *masks(3)),
    optional_at=(2, 3, 5),
    counted={2: {"shape": (4, 8192)}, 3: {"shape": (3, 4096)}, 5: {"shape": (2, 28672)}},
    executed=(
        *grouped(((7, 300), 3), tile=(4, 64)),
        *grouped(((5, 96), 2), tile=(2, 64)),
        *grouped(((5, 96), 3), ((3, 10000), 2)),
    ),
)
ROWS = rows(
    {"activation": "sigmoid", "casting_mode": "gemma"}, FP32_WEIGHTED, {"gate_dtype": FP32},
    backward=({**WEIGHTLESS, **DX_ALONE}, *masks(3)),
)  # fmt: skip


def described(form: str, forms: Forms, **more: Any) -> OpUnderTest:
    return OpUnderTest(
        name="gated_rms_norm",
        form=form,
        choices={
            "gate_dtype": (SAME, SAME, FP32), "weight_dtype": PARAMETER, "eps": EPS,
            "norm_before_gate": (True, False), "num_groups": (1, 1, 2, 3),
            "activation": ("silu", "sigmoid"), "casting_mode": ("llama", "gemma"),
        },
        coupled=groups,
        tensors=tensors,
        computed={"group_size": group_size},
        output_magnitudes=lambda c, t: [magnitudes(c, t)[0]],
        gradient_magnitudes=gradient_magnitudes,
        sample_shape=lambda rows: (rows, 2, 6),
        forms=forms,
        autocast_as="silu",
        **more,
    )  # fmt: skip


OPS = (
    described(
        "",
        ROWS,
        sampled=WEIGHTED,
        cases={**wide(17001, **WEIGHTED), **ZERO_EPS},
        compiled=[
            {**form, "norm_before_gate": first} for form in COMPILED for first in (True, False)
        ],
    ),
    described("grouped", GROUPED, sampled={**WEIGHTED, "norm_before_gate": False, "num_groups": 2}),
)
