"""The norms under test."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from launch_forms import BF16, FP32, Fields, Forms, masks, rows, shapes
from op_under_test import SAME, OpUnderTest, Pick, Tensors, drawn_for, drawn_rows, max_abs

EPS = (1e-6, 1e-5, 1e-2)
# The dtypes of a parameter: none if it is absent, the case's, or float32.
PARAMETER = (None, SAME, FP32)
MODES = ("llama", "gemma", "none")


def tensors(case: Any, dim: int = -1) -> Tensors:
    """Draw x, weight, bias, residual, dy and ds on the device under test."""
    columns, values = (case.shape[dim],), drawn_for(case)
    dtypes = {name: getattr(case, f"{name}_dtype", None) for name in ("bias", "residual")}
    residual = case.dtype if dtypes["residual"] in (None, SAME) else dtypes["residual"]
    s_dtype = torch.promote_types(case.dtype, residual)
    return {
        "x": values.draw(case.shape, SAME, case.layout, case.scale, case.shift),
        "weight": values.draw(columns, case.weight_dtype),
        "bias": values.draw(columns, dtypes["bias"]),
        "residual": values.draw(case.shape, dtypes["residual"], case.layout),
        "dy": values.draw(case.shape, s_dtype, case.dy_layout),
        "ds": values.draw(case.shape, s_dtype if getattr(case, "has_ds", 0) else None, case.layout),
    }


def backward_sees_stored_sum(case: Any, tensors: Tensors) -> Tensors:
    """Replace x by x + residual as the forward rounds and stores it, and the residual by zeros."""
    s = tensors["x"] + tensors["residual"]
    return {**tensors, "x": s, "residual": torch.zeros_like(s)}


def magnitudes(op: str, case: Any, tensors: Tensors) -> tuple[float, float]:
    """Return the magnitudes of the outputs, and of dx."""
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
    scale = max_abs(tensors["weight"], 1.0) + abs(getattr(case, "offset", 0.0))
    normalised = rstd * x.abs().max()
    gradient = rstd * max_abs(tensors["dy"]) * scale * (1 + normalised)
    return float(normalised * scale), float(gradient)


def output_magnitudes(op: str, case: Any, tensors: Tensors) -> list[float]:
    forward, _ = magnitudes(op, case, tensors)
    return [forward] * (2 if op == "fused_add_rms_norm" else 1)


def gradient_magnitudes(op: str, dim: int, case: Any, tensors: Tensors) -> list[float]:
    """Return the magnitudes of dx, dweight and dbias; the last two are sums over all rows."""
    x, dy = tensors["x"], tensors["dy"]
    if x.numel() == 0:
        return [0.0, 0.0, 0.0]
    _, gradient = magnitudes(op, case, tensors)
    plain = replace(case, offset=0.0) if hasattr(case, "offset") else case
    normalised, _ = magnitudes(op, plain, {**tensors, "weight": None})
    terms = float(dy.double().abs().sum() / x.shape[dim])
    return [gradient, terms * (1 + normalised), terms]


def with_weight(pick: Pick, fields: Fields) -> Fields:
    """Draw rows; without a weight the offset is 0."""
    offset = fields["offset"] if fields["weight_dtype"] else 0.0
    return {**drawn_rows(pick, fields), "offset": offset}


def groups(pick: Pick, fields: Fields) -> Fields:
    """Draw a shape for group_norm."""
    channels = fields["num_groups"] * pick((1, 2, 3, 7))
    positions = ((), (1,), (7,), (0,), (5, 7), (2, 3, 3))
    large = () if fields["tile"] else ((129,), (16, 16))
    return {"shape": (pick((0, 1, 2)), channels, *pick(positions + large))}


def norm(name: str, *, dim: int = -1, **fields: Any) -> OpUnderTest:
    """Return the entry of a norm whose weight has the size of dimension `dim`."""
    defaults = {
        "tensors": partial(tensors, dim=dim),
        "output_magnitudes": partial(output_magnitudes, name),
        "gradient_magnitudes": partial(gradient_magnitudes, name, dim),
        "autocast_as": name.removeprefix("fused_add_"),
    }
    return OpUnderTest(name=name, **{**defaults, **fields})


RMS_OPTIONS = {
    "weight_dtype": PARAMETER, "eps": EPS, "offset": (0.0, 1.0, -0.5), "casting_mode": MODES,
}  # fmt: skip
# layer_norm must subtract a mean far from zero before it squares.
SHIFTED = {"weight_dtype": PARAMETER, "bias_dtype": PARAMETER, "eps": EPS, "shift": (0.0, 30.0)}
WEIGHTED, AFFINE = {"weight_dtype": SAME}, {"weight_dtype": SAME, "bias_dtype": SAME}
MODE_FORMS: tuple[Fields, ...] = (
    {"casting_mode": "gemma", "offset": 1.0}, {"casting_mode": "none"},
)  # fmt: skip
PLAIN, FP32_AFFINE = dict.fromkeys(AFFINE, None), dict.fromkeys(AFFINE, FP32)
FP32_WEIGHTED, WEIGHTLESS = {"weight_dtype": FP32}, {"weight_dtype": None}
DX_ALONE = {"output_mask": (True, False, False)}
COMPILED = shapes(*((4, N) for N in (100, 4096, 16384, 32768, 65536, 131072)))


def wide(*columns: int, **fields: Any) -> dict[str, Fields]:
    """Return cases of bfloat16 rows with the host code's own plan."""
    fields = {"dtype": BF16, "layout": "sliced", **fields}
    return {f"{N}-columns": {"shape": (3, N), **fields} for N in columns}


def far_mean(shape: tuple[int, ...], *tiles: Any, **fields: Any) -> dict[str, Fields]:
    """Return cases whose means are so much larger than the deviations that mean(x**2) - mean(x)**2
    has no correct digit."""
    fields = {"shape": shape, "dtype": FP32, "shift": 1e4, **AFFINE, **fields}
    return {f"far-mean-{tile}": {**fields, "tile": tile} for tile in tiles}


# A tile is padded with rows of zeros, whose 1 / rms is infinite without an eps.
ZERO_EPS = {"zero-eps": {"shape": (3, 13), "dtype": FP32, "eps": 0.0, "tile": (4, 64), **WEIGHTED}}
GROUPS = (
    ((2, 320, 64, 64), 32), ((2, 640, 7, 9), 32), ((2, 1280, 16, 16), 32), ((2, 320, 128, 128), 32),
    ((1, 64, 512, 512), 32), ((1000, 512), 32), ((4, 4096), 1), ((2, 100000), 1),
    ((2, 6, 100003), 3), ((2, 4, 11), 4),
)  # fmt: skip


def grouped(*sizes: tuple[tuple[int, ...], int], **fields: Any) -> tuple[Fields, ...]:
    return tuple({"shape": shape, "num_groups": groups, **fields} for shape, groups in sizes)


COUNTED_GROUPS = {
    **dict(zip((0, 1, 2, 5), grouped(*(
        (shape, 2) for shape in ((1, 20, 64, 64), (2, 40, 7, 9), (1, 80, 16, 16), (4, 32))
    )), strict=True)),
    6: {"shape": (2, 4096)},
    7: {"shape": (1, 40000)},
}  # fmt: skip

OPS = (
    norm(
        "rms_norm",
        choices=RMS_OPTIONS,
        coupled=with_weight,
        sampled=WEIGHTED,
        cases={**wide(4096, 14336, 20001, 65536, 70003, **WEIGHTED), **ZERO_EPS},
        forms=rows(
            *MODE_FORMS, FP32_WEIGHTED, backward=({**WEIGHTLESS, **DX_ALONE}, *masks(2))
        ),
        compiled=(*COMPILED, {"shape": (4, 4096), "casting_mode": "none"}),
    ),
    norm(
        "fused_add_rms_norm",
        choices={**RMS_OPTIONS, "residual_dtype": (SAME, FP32), "has_ds": (True, False)},
        coupled=with_weight,
        computed={"s": lambda case, tensors: tensors["x"] + tensors["residual"]},
        gradients=("x", "weight"),
        seen_by_backward=backward_sees_stored_sum,
        shaping=("x", "s"),
        sampled=WEIGHTED,
        cases=wide(4096, 14336, 20001, 65536, **WEIGHTED),
        forms=rows(
            *MODE_FORMS, FP32_WEIGHTED, {"residual_dtype": FP32},
            backward=(
                {"has_ds": False}, {**WEIGHTLESS, **DX_ALONE}, *masks(2),
                {"has_ds": False, **DX_ALONE},
            ),
        ),
        compiled=COMPILED,
    ),
    norm(
        "layer_norm",
        choices=SHIFTED,
        sampled=AFFINE,
        cases={
            **wide(4096, 14336, 65536, **AFFINE, shift=30.0),
            **far_mean((4, 100), None, (1, 16)),
        },
        forms=rows(FP32_AFFINE, {"bias_dtype": None}, backward=({**PLAIN, **DX_ALONE}, *masks(3))),
        compiled=COMPILED,
    ),
    norm(
        "group_norm",
        dim=1,
        choices={
            **SHIFTED, "num_groups": (1, 2, 3), "tile": (None, (1, 16), (2, 16), (4, 4), (4, 16)),
        },
        coupled=groups,
        sample_shape=lambda rows: (rows, 6, 5),
        sampled={**AFFINE, "num_groups": 3},
        cases={
            **{
                name: {**form, "dtype": BF16, "shift": 30.0, **AFFINE}
                for name, form in zip(
                    ("narrow", "walked", "in-pieces", "no-positions", "channel-wide"),
                    grouped(
                        ((1, 64, 32, 33), 32), ((1, 12, 130, 130), 2), ((1, 4, 300, 301), 1),
                        ((2, 4100), 2), ((3, 2, 70000), 2),
                    ),
                    strict=True,
                )
            },
            **far_mean((2, 6, 50), None, (1, 16), (2, 8), (4, 8), num_groups=2),
        },
        forms=Forms(
            shapes=grouped(*GROUPS),
            options=(FP32_AFFINE,),
            backward_options=({**PLAIN, **DX_ALONE}, *masks(3)),
            optional_at=(0, 1, 2, 3, 5, 7),
            counted=COUNTED_GROUPS,
            executed=(
                *grouped(((3, 12, 5, 7), 3), tile=(2, 16)),
                *grouped(((3, 12, 5, 7), 3)),
                *grouped(((3, 12, 5, 7), 3), tile=(4, 64)),
                # The second fits no tile, and is kept in the dtype that it is stored in.
                *grouped(((5, 12), 3), ((2, 6, 50, 51), 2), ((2, 44, 15, 16), 2)),
                *grouped(((2, 100, 1), 1), tile=(8, 16)),
                # One group of channels with one position is a row of layer_norm.
                *grouped(((2, 5000, 1), 1)),
            ),
        ),
        compiled=grouped(
            *(
                (shape, 32)
                for shape in (
                    (2, 64, 8, 8), (2, 320, 64, 64), (1, 512, 64, 64), (1, 256, 128, 128),
                    (1, 64, 512, 512),
                )
            )
        ),
    ),
)  # fmt: skip
