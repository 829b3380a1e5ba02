"""The sums of router_losses under test, of one to eight layers."""

from __future__ import annotations

from typing import Any

import torch

from launch_forms import BF16, FP32, Fields, Forms, shapes
from op_under_test import OpUnderTest, Pick, Tensors, drawn_for, drawn_rows, laid_out, max_abs

LAYERS = tuple(f"x{i}" for i in range(8))


def tensors(case: Any) -> Tensors:
    """Draw the tensors. The logits of a row all differ, so that rounding changes no selection."""
    values = drawn_for(case)
    drawn: Tensors = {}
    for i, name in enumerate(LAYERS):
        ranks = values.draw(case.shape, FP32).argsort(-1).to(FP32)
        logits = (ranks - case.shape[-1] / 2) * (case.scale / 8)
        drawn[name] = laid_out(logits.to(case.dtype), case.layout) if i < case.layers else None
    weight = values.draw(case.shape[:-1], FP32).abs()
    weight = torch.where(weight < 0.5, 0.0, weight)
    drawn["token_weight"] = {
        "mask": (weight != 0).to(case.dtype), "weights": weight, "none": None
    }[case.weights]  # fmt: skip
    wide = torch.promote_types(case.dtype, FP32)
    # The last two entries of output_mask say whether there are dz and dprobabilities, at least one.
    wants = (case.output_mask[-1], case.output_mask[-2] or not case.output_mask[-1])
    drawn["dprobabilities"] = values.draw(case.shape[-1:], wide) if wants[0] else None
    drawn["dz"] = values.draw((), wide) if wants[1] else None
    return drawn


def coupled(pick: Pick, fields: Fields) -> Fields:
    rows = drawn_rows(pick, fields)
    return {**rows, "top_k": pick([k for k in (1, 2, 8) if k <= rows["shape"][-1]])}


def _terms(case: Any, tensors: Tensors) -> tuple[float, float, float]:
    """Return the weight of all tokens, and bounds of the largest logit and lse."""
    rows = tensors["x0"].numel() / max(1, case.shape[-1])
    weight = tensors["token_weight"]
    weight = rows if weight is None else float(weight.double().sum())
    largest = max(max_abs(tensors[name]) for name in LAYERS)
    return weight * case.layers, largest, largest + 8


def output_magnitudes(case: Any, tensors: Tensors) -> list[float]:
    weight, largest, lse = _terms(case, tensors)
    return [weight * (1 + largest), weight * 2 * lse * (1 + lse), weight]


def gradient_magnitudes(case: Any, tensors: Tensors) -> list[float]:
    _, largest, lse = _terms(case, tensors)
    weight = max_abs(tensors["token_weight"], 1.0)
    slope = 2 * max_abs(tensors["dprobabilities"]) + 2 * max_abs(tensors["dz"]) * lse
    return [weight * slope * (2 + 2 * largest)] * len(LAYERS)


SHAPES = shapes((4096, 8), (4096, 60), (4096, 128), (4096, 512), layers=8, top_k=2)

OPS = (
    OpUnderTest(
        name="router_losses_forward",
        choices={
            "tile": (None,), "layers": (3, 1, 8), "top_k": (1,), "scale": (1.0, 0.1),
            "weights": ("none", "mask", "weights"),
        },
        coupled=coupled,
        tensors=tensors,
        no_gradient=("token_weight",),
        output_magnitudes=output_magnitudes,
        gradient_magnitudes=gradient_magnitudes,
        sampled={"weights": "weights", "top_k": 2},
        # As many experts as make the integers of a tile long, and several tiles.
        cases={
            "many": {"shape": (3, 9000), "dtype": FP32, "layers": 1, "top_k": 8},
            "tiles": {"shape": (400, 60), "dtype": BF16, "layers": 8, "top_k": 4},
        },
        forms=Forms(
            shapes=shapes(
                *((4096, E) for E in (2, 8, 60, 128, 512, 2048)), layers=2, top_k=2
            ),
            options=({"weights": "none"}, {"weights": "mask"}, {"top_k": 8}),
            backward_options=[
                {"output_mask": (*(True,) * 6, *wants)} for wants in ((True, False), (False, True))
            ],
            optional_at=(2, 3),
            executed=shapes((30, 60), (3, 2048), layers=2, top_k=8),
        ),
        compiled=(*SHAPES, *({**shape, "weights": "none"} for shape in SHAPES[2:])),
        rowwise=(),
        shaping=("x0",),
        cost=2,
        autocast_as="mul.Tensor",
    ),
)  # fmt: skip
