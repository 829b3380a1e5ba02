"""neighborhood_attention under test, in the form of neighborhood_attention_forward."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from launch_forms import FP32, Fields, Forms, masks
from liger_ops import library
from op_under_test import (
    DY_LAYOUTS,
    SAME,
    X_LAYOUTS,
    Magnitude,
    OpUnderTest,
    Pick,
    Tensors,
    drawn_for,
    max_abs,
)

INPUTS = ("query", "key", "value")


def tensors(case: Any) -> Tensors:
    values = drawn_for(case)
    shape = (case.shape[0], case.key_heads, *case.shape[2:])
    drawn: Tensors = {
        "query": values.draw(case.shape, SAME, case.layout, case.scale),
        "key": values.draw(shape, SAME, case.key_layout),
        "value": values.draw(shape, SAME, case.key_layout),
    }
    forward = library.OPS["neighborhood_attention_forward"].definition
    drawn["y"], drawn["lse"] = forward(*(drawn[name] for name in INPUTS), *options(case))
    drawn["dy"] = values.draw(case.shape, SAME, case.dy_layout)
    statistics = "transposed" if case.dy_layout == "model" else case.dy_layout
    drawn["dlse"] = values.draw(case.shape[:-1], drawn["lse"].dtype, statistics)
    return drawn


def options(case: Any) -> tuple[Any, ...]:
    lists = (case.kernel_size, case.dilation, case.is_causal)
    return (*map(list, lists), case.border, case.softmax_scale)


def largest_norm(tensor: Tensor | None) -> float:
    return max_abs(tensor.double().norm(dim=-1))


def factor(case: Any) -> float:
    return case.shape[-1] ** -0.5 if case.softmax_scale is None else abs(case.softmax_scale)


def roundings(case: Any, tensors: Tensors) -> float:
    """Return the relative error of a softmax's weight in units of the checks' float32 errors.

    A score is off by a rounding of its terms, which is a relative error of its exponential. An
    operand of a product is rounded once more, to the dtype of the inputs.
    """
    scores = factor(case) * largest_norm(tensors["query"]) * largest_norm(tensors["key"])
    stored = 0.0
    if case.dtype.itemsize == 2:
        stored = torch.finfo(case.dtype).eps / torch.finfo(torch.float32).eps / 8
    return 2 + 2 * scores + math.log(math.prod(case.kernel_size)) + stored


def output_magnitudes(case: Any, tensors: Tensors) -> list[Magnitude]:
    scores = factor(case) * largest_norm(tensors["query"]) * largest_norm(tensors["key"])
    largest = max_abs(tensors["value"])
    return [largest * roundings(case, tensors), 1 + scores + math.log(math.prod(case.kernel_size))]


def gradient_magnitudes(case: Any, tensors: Tensors) -> list[Magnitude]:
    # The gradient of a score is at most this, for each unit of its weight in the softmax.
    upstream = 2 * largest_norm(tensors["dy"]) * largest_norm(tensors["value"])
    upstream = (upstream + max_abs(tensors["dlse"])) * factor(case) * roundings(case, tensors)
    # The queries of a key, in each head that shares it.
    queries = min(
        2 ** len(case.kernel_size) * math.prod(case.kernel_size), math.prod(case.shape[2:-1])
    )
    queries *= case.shape[1] // case.key_heads
    return [
        upstream * max_abs(tensors["key"]),
        upstream * max_abs(tensors["query"]) * queries,
        max_abs(tensors["dy"]) * queries * roundings(case, tensors),
    ]


def windows(pick: Pick, fields: Fields) -> Fields:
    # The interpreter's time grows with the number of tiles, by a few milliseconds each.
    line, border = pick((True, False)), pick(("clipped", "shifted"))
    side = (1, 2, 3, 6)
    lengths = (pick((1, 2, 5, 17, 40)),) if line else (pick(side), pick(side))
    windows = []
    for length in lengths:
        is_causal = pick((False, True))
        size = pick((1, 2, 3, 4, 9, 33) if line else (1, 2, 3, 4))
        dilation = pick((1, 1, 2, 3, 50))
        if not is_causal and border == "clipped":
            size -= 1 - size % 2
        if not is_causal and border == "shifted":
            size = min(size, length)
            dilation = min(dilation, length // size)
        windows.append((size, dilation, is_causal))
    kernel_size, dilation, is_causal = zip(*windows, strict=True)
    batch, key_heads, group = pick(
        ((1, 1, 1), (1, 1, 3), (1, 2, 1), (1, 2, 2), (2, 1, 1), (2, 1, 2), (0, 1, 1))
    )
    return {
        "shape": (batch, key_heads * group, *lengths, pick((1, 3, 8, 16, 20, 33))),
        "key_heads": key_heads, "kernel_size": kernel_size, "dilation": dilation,
        "is_causal": is_causal, "border": border,
        # A tile is of positions, in two dimensions.
        "tile": pick((None, (1, 16) if line else (2, 8), (4, 4))),
    }  # fmt: skip


LAYOUTS = (*X_LAYOUTS, "model")
CHOICES = {
    "key_heads": (1,), "key_layout": LAYOUTS, "layout": LAYOUTS,
    "dy_layout": (*DY_LAYOUTS, "model"),
    "kernel_size": ((3,),), "dilation": ((1,),), "is_causal": ((False,),),
    "border": ("clipped", "shifted"), "softmax_scale": (None, 1.0, -0.3, 0.0), "tile": (None,),
}  # fmt: skip


def described(form: str, **more: Any) -> OpUnderTest:
    return OpUnderTest(
        name="neighborhood_attention_forward",
        form=form,
        choices=CHOICES,
        coupled=windows,
        tensors=tensors,
        computed={"scale": lambda case, tensors: case.softmax_scale},
        output_magnitudes=output_magnitudes,
        gradient_magnitudes=gradient_magnitudes,
        # The interpreter's time grows with the product of queries and keys.
        cost=2,
        multiplies=True,
        autocast_as="scaled_dot_product_attention",
        **more,
    )


ON_LINE = {"shape": (1, 8, 32768, 64), "key_heads": 2, "layout": "model", "key_layout": "model"}
COMPILED_LINE = {"kernel_size": (129,), "dilation": (1,), "key_heads": 2}
OPS = (
    described(
        "line",
        # Two heads share one of key; the windows of the ends are cut.
        sample_shape=lambda rows: (rows, 2, 4, 1),
        sampled={"dilation": (2,), "softmax_scale": 0.7},
        cases={
            # Every query from the 27th on attends to the last key of the second tile, the 32nd.
            "tile-at-the-shifted-border": {
                "shape": (1, 1, 40, 8), "dtype": FP32, "kernel_size": (9,), "border": "shifted",
                "tile": (1, 16),
            },
        },
        forms=Forms(
            shapes=[{**ON_LINE, "shape": (1, 8, 32768, D)} for D in (64, 80, 128, 256)],
            options=({"border": "shifted"},),
            backward_options=masks(3),
            executed=(
                {"shape": (1, 4, 70, 20), "key_heads": 2, "kernel_size": (9,)},
                {
                    "shape": (1, 2, 40, 16), "kernel_size": (5,), "dilation": (3,), "tile": (1, 16),
                },
            ),
            common={"softmax_scale": None, "kernel_size": (129,), "dilation": (1,)},
        ),
        compiled=(
            {"shape": (1, 4, 512, 64), **COMPILED_LINE},
            {"shape": (1, 4, 512, 256), **COMPILED_LINE, "border": "shifted"},
        ),
    ),
    described(
        "plane",
        sample_shape=lambda rows: (rows, 1, 4, 2, 1),
        sampled={
            "kernel_size": (3, 3), "dilation": (1, 1), "is_causal": (False, True),
            "border": "shifted",
        },
        forms=Forms(
            shapes=[
                {"shape": (2, 4, 56, 56, 64), "key_heads": 4},
                {"shape": (2, 4, 56, 56, 64), "key_heads": 4, "dilation": (2, 4)},
            ],
            options=({"border": "clipped"},),
            backward_options=masks(3),
            executed=(
                {"shape": (1, 2, 9, 20, 16), "kernel_size": (3, 5), "dilation": (2, 1)},
            ),
            common={"kernel_size": (7, 7), "is_causal": (False, False)},
        ),
        compiled=({"shape": (1, 4, 32, 32, 80), "key_heads": 2, "is_causal": (False, True)},),
    ),
)  # fmt: skip
