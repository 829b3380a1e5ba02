"""modulated_rms_norm and modulated_layer_norm under test, with each shape of scale."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import norm_cases
from launch_forms import BF16, FP32, LARGE, Fields, Forms, shapes
from norm_cases import AFFINE, MODE_FORMS, MODES, PLAIN, RMS_OPTIONS, SHIFTED, WEIGHTED, WEIGHTLESS
from op_under_test import SAME, OpUnderTest, Tensors, drawn_for, drawn_rows, max_abs

# The shape of scale, by the form of the op and x's shape.
SCALES: dict[str, Callable[[tuple[int, ...]], tuple[int, ...]]] = {
    "": lambda shape: shape[-1:],
    "sample": lambda shape: (*shape[:-1][:1], shape[-1]),
    "token": lambda shape: shape,
}


def tensors(form: str, case: Any) -> Tensors:
    values = drawn_for(case, 1)
    shape = SCALES[form](case.shape)
    layout = case.layout if form == "token" else "contiguous"
    return {
        **norm_cases.tensors(case),
        "scale": values.draw(shape, case.scale_dtype, layout, 0.5),
        "shift": values.draw(shape, case.shift_dtype, layout),
    }


def magnitudes(name: str, case: Any, tensors: Tensors) -> tuple[float, float, float]:
    """Return the magnitudes of norm(x), y and dx."""
    plain = name.removeprefix("modulated_")
    normalised, gradient = norm_cases.magnitudes(plain, case, tensors)
    normalised += max_abs(tensors["bias"])
    factor = 1 + max_abs(tensors["scale"])
    return normalised, normalised * factor + max_abs(tensors["shift"]), gradient * factor


def gradient_magnitudes(name: str, case: Any, tensors: Tensors) -> list[float]:
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
        gradient, of_sample * (1 + normalised), of_sample, terms * factor * (1 + xhat),
        terms * factor,
    ]  # fmt: skip


def forms(plain: Fields, options: tuple[Fields, ...], gradients: int, form: str) -> Forms:
    """Return the launch forms: rows of three samples, narrow, as in DiT, Flux and Wan, and wide."""
    # The gradient of each token's shift is dy, without a launch.
    alone = ((0,), (1,)) if form == "token" else ((0,), (1,), (2,))
    subsets = (*alone, tuple(range(1, gradients)))
    return Forms(
        shapes=shapes(*((3, 1024, N) for N in (100, 1152, 3072, 5120, 131072, *LARGE))),
        options=({**plain, "casting_mode": "float32", "scale_dtype": FP32}, plain, *options),
        backward_options=tuple(
            {**plain, "output_mask": tuple(i in subset for i in range(5))} for subset in subsets
        ),
        optional_at=(1, 2, 3),
        counted={} if form else {2: {"shape": (1, 3, 3072)}, 3: {"shape": (1, 2, 5120)}},
        executed=(
            {"shape": (3, 2, 300), "tile": (4, 64)}, {"shape": (2, 3, 100), "tile": (2, 128)},
            {"shape": (2, 3, 5000)},
        ),
    )  # fmt: skip


def described(name: str, form: str) -> OpUnderTest:
    is_rms = name == "modulated_rms_norm"
    weighted = WEIGHTED if is_rms else AFFINE
    options = RMS_OPTIONS if is_rms else SHIFTED
    modes = MODES if is_rms else ("torch",)
    both = {"scale_dtype": SAME, "shift_dtype": SAME}
    bare = {**(WEIGHTLESS if is_rms else PLAIN), "shift_dtype": None, "output_mask": (False,) * 5}
    wide = {"shape": (2, 2, 17001), "dtype": BF16, "shift_dtype": SAME, "layout": "sliced"}
    return OpUnderTest(
        name=name,
        form=form,
        choices={
            **options,
            "casting_mode": (*modes, "float32"),
            "scale_dtype": (SAME, FP32),
            "shift_dtype": (None, SAME, FP32),
        },
        coupled=norm_cases.with_weight if is_rms else drawn_rows,
        tensors=partial(tensors, form),
        output_magnitudes=lambda c, t: [magnitudes(name, c, t)[1]],
        gradient_magnitudes=partial(gradient_magnitudes, name),
        sampled={**weighted, **both},
        cases={"17001-columns": {**wide, **(WEIGHTED if is_rms else {})}} if form else {},
        forms=forms(
            WEIGHTLESS if is_rms else PLAIN, MODE_FORMS if is_rms else (), 4 + (not is_rms), form
        ),
        compiled=[
            {"shape": (4, N) if form == "token" else (2, 2, N), **more}
            for N in (4096, 32768)
            for more in ({}, bare)
            if form
        ],
        shaping=("x", "scale"),
        autocast_as="rms_norm" if is_rms else "layer_norm",
        autocast_keeps=("scale", "shift"),
    )


OPS = tuple(
    described(name, form)
    for name in ("modulated_rms_norm", "modulated_layer_norm")
    for form in SCALES
)
