"""neighborhood_attention under test, in the form of neighborhood_attention_forward."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from liger_ops import library
from op_under_test import Case, Magnitude, OpUnderTest, Tensors, Values, max_abs


@dataclass(frozen=True, kw_only=True)
class NeighborhoodCase(Case):
    """A drawn use of neighborhood_attention. shape is query's; a tile is of positions, in two
    dimensions."""

    key_heads: int = 1
    # The layout of key and value.
    key_layout: str = "contiguous"
    kernel_size: tuple[int, ...] = (3,)
    dilation: tuple[int, ...] = (1,)
    is_causal: tuple[bool, ...] = (False,)
    border: str = "clipped"
    softmax_scale: float | None = None

    @property
    def options(self) -> tuple[Any, ...]:
        lists = (self.kernel_size, self.dilation, self.is_causal)
        return (*map(list, lists), self.border, self.softmax_scale)

    @property
    def keys(self) -> int:
        """The keys of a window."""
        return math.prod(self.kernel_size)


INPUTS = ("query", "key", "value")


def tensors(case: NeighborhoodCase) -> Tensors:
    values = Values(case.seed)
    shape = (case.shape[0], case.key_heads, *case.shape[2:])
    given: Tensors = {
        "query": values.draw(case.shape, case.dtype, case.layout, case.scale),
        "key": values.draw(shape, case.dtype, case.key_layout),
        "value": values.draw(shape, case.dtype, case.key_layout),
    }
    forward = library.OPS["neighborhood_attention_forward"].definition
    given["y"], given["lse"] = forward(*forward_args(case, given))
    given["dy"] = values.draw(case.shape, case.dtype, case.dy_layout)
    statistics = "transposed" if case.dy_layout == "model" else case.dy_layout
    given["dlse"] = values.draw(case.shape[:-1], given["lse"].dtype, statistics)
    return given


def forward_args(case: NeighborhoodCase, tensors: Tensors) -> tuple[Any, ...]:
    return (*(tensors[name] for name in INPUTS), *case.options)


def backward_args(case: NeighborhoodCase, tensors: Tensors) -> tuple[Any, ...]:
    names = ("dy", "dlse", *INPUTS, "y", "lse")
    return (*(tensors[name] for name in names), *case.options, list(case.output_mask))


def largest_norm(tensor: Tensor | None) -> float:
    return max_abs(tensor.double().norm(dim=-1))


def factor(case: NeighborhoodCase) -> float:
    return case.shape[-1] ** -0.5 if case.softmax_scale is None else abs(case.softmax_scale)


def roundings(case: NeighborhoodCase, tensors: Tensors) -> float:
    """The relative error of a weight of the softmax, in units of the float32 rounding errors that
    the checks allow. A score is off by a rounding of its terms, which is a relative error of its
    exponential; a product's operand is rounded once more, to the dtype of the inputs."""
    scores = factor(case) * largest_norm(tensors["query"]) * largest_norm(tensors["key"])
    stored = 0.0
    if case.dtype.itemsize == 2:
        stored = torch.finfo(case.dtype).eps / torch.finfo(torch.float32).eps / 8
    return 2 + 2 * scores + math.log(case.keys) + stored


def output_magnitudes(case: NeighborhoodCase, tensors: Tensors) -> list[Magnitude]:
    scores = factor(case) * largest_norm(tensors["query"]) * largest_norm(tensors["key"])
    largest = max_abs(tensors["value"])
    return [largest * roundings(case, tensors), 1 + scores + math.log(case.keys)]


def gradient_magnitudes(case: NeighborhoodCase, tensors: Tensors) -> list[Magnitude]:
    # The gradient of a score is at most this, for each unit of its weight in the softmax.
    upstream = 2 * largest_norm(tensors["dy"]) * largest_norm(tensors["value"])
    upstream = (upstream + max_abs(tensors["dlse"])) * factor(case) * roundings(case, tensors)
    # The queries of a key, in each head that shares it.
    queries = min(2 ** len(case.kernel_size) * case.keys, math.prod(case.shape[2:-1]))
    queries *= case.shape[1] // case.key_heads
    return [
        upstream * max_abs(tensors["key"]),
        upstream * max_abs(tensors["query"]) * queries,
        max_abs(tensors["dy"]) * queries * roundings(case, tensors),
    ]


def sample(dtype: torch.dtype = torch.float64, rows: int = 3, **options: Any) -> NeighborhoodCase:
    """Two heads share one of key; the windows of the ends are cut."""
    options = {"dilation": (2,), "softmax_scale": 0.7, **options}
    return NeighborhoodCase(shape=(rows, 2, 4, 1), dtype=dtype, **options)


PLANE: dict[str, Any] = {
    "kernel_size": (3, 3),
    "dilation": (1, 1),
    "is_causal": (False, True),
    "border": "shifted",
    "softmax_scale": None,
}


def sample_of_plane(
    dtype: torch.dtype = torch.float64, rows: int = 3, **options: Any
) -> NeighborhoodCase:
    return NeighborhoodCase(shape=(rows, 1, 4, 2, 1), dtype=dtype, **{**PLANE, **options})


def described(form: str, sample: Any) -> OpUnderTest:
    return OpUnderTest(
        name="neighborhood_attention_forward",
        form=form,
        tensors=tensors,
        forward_args=forward_args,
        backward_args=backward_args,
        gradients_of=INPUTS,
        gradients_from=("dy", "dlse"),
        output_magnitudes=output_magnitudes,
        gradient_magnitudes=gradient_magnitudes,
        sample=sample,
        per_row=(*INPUTS, "dy", "dlse", "y", "lse"),
        leading=("query",),
        multiplies=True,
        autocast_as="scaled_dot_product_attention",
    )


OPS = (described("line", sample), described("plane", sample_of_plane))
