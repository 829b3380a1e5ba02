"""multi_token_attention under test, in the form of multi_token_attention_forward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from op_under_test import Case, Magnitude, OpUnderTest, Tensors, Values, max_abs


@dataclass(frozen=True, kw_only=True)
class MultiTokenCase(Case):
    """shape is that of scores."""

    # None is that of scores.
    weight_dtype: torch.dtype | None = None
    out: int = 4
    kernel: tuple[int, int] = (3, 3)
    stride: tuple[int, ...] = (1,)
    padding: tuple[int, ...] = (1,)
    dilation: tuple[int, ...] = (1,)
    groups: int = 1
    bias: bool = True
    sparse: bool = False

    @property
    def options(self) -> tuple[Any, ...]:
        return (*map(list, (self.stride, self.padding, self.dilation)), self.groups, self.sparse)

    @property
    def convolution(self) -> tuple[Any, ...]:
        return (*(list(v) * (2 // len(v)) for v in self.options[:3]), self.groups)


INPUTS = ("scores", "weight", "bias")


def tensors(case: MultiTokenCase) -> Tensors:
    values = Values(case.seed)
    dtype = case.weight_dtype or case.dtype
    channels = case.shape[1] // case.groups
    terms = channels * case.kernel[0] * case.kernel[1]
    given = {
        "scores": values.draw(case.shape, case.dtype, case.layout, case.scale, case.shift),
        "weight": values.draw((case.out, channels, *case.kernel), dtype, scale=terms**-0.5),
        "bias": values.draw((case.out,), dtype if case.bias else None),
    }
    form = torch.empty(case.shape, device="meta")
    weight = torch.empty(given["weight"].shape, device="meta")
    shape = tuple(F.conv2d(form, weight, None, *case.convolution).shape)
    return {**given, "dy": values.draw(shape, dtype, case.dy_layout)}


def forward_args(case: MultiTokenCase, tensors: Tensors) -> tuple[Any, ...]:
    return (*(tensors[name] for name in INPUTS), *case.options)


def backward_args(case: MultiTokenCase, tensors: Tensors) -> tuple[Any, ...]:
    return (tensors["dy"], *forward_args(case, tensors), list(case.output_mask))


def probabilities(case: MultiTokenCase, tensors: Tensors) -> tuple[Tensor, float]:
    """p, and its largest relative error in units of the float32 rounding errors that the checks
    allow: a score's difference to the maximum is rounded, which is a relative error of its
    exponential; and p is rounded to weight's dtype."""
    wide = tensors["scores"].double()
    future = torch.ones(case.shape[-2:], dtype=torch.bool, device=wide.device).triu(1)
    largest = wide.masked_fill(future, -torch.inf).amax(-1, keepdim=True)
    below = (wide - largest).masked_fill(future, -torch.inf)
    # Of an element of which the exponential is below 1e-9 of the largest, the error is nothing.
    spread = min(20.0, max_abs(below.masked_fill(future, 0.0)))
    stored = torch.finfo(tensors["weight"].dtype).eps / torch.finfo(torch.float32).eps / 8
    return torch.softmax(below, -1), 2 + spread + stored


def output_magnitudes(case: MultiTokenCase, tensors: Tensors) -> list[Magnitude]:
    if case.shape[0] == 0:
        return [0.0]
    p, roundings = probabilities(case, tensors)
    p = torch.ones_like(p).tril() if case.sparse else p
    sums = F.conv2d(p, tensors["weight"].double().abs(), None, *case.convolution)
    return [max_abs(sums) * roundings + max_abs(tensors["bias"])]


def gradient_magnitudes(case: MultiTokenCase, tensors: Tensors) -> list[Magnitude]:
    if case.shape[0] == 0:
        return [0.0] * 3
    p, roundings = probabilities(case, tensors)
    p = torch.ones_like(p).tril() if case.sparse else p
    dc = tensors["dy"].double().tril().abs()
    dp, dweight, dbias = torch.ops.aten.convolution_backward(
        dc, p, tensors["weight"].double().abs(), [case.out], *case.convolution[:3], False,
        [0, 0], case.groups, [True] * 3,
    )  # fmt: skip
    return [2 * max_abs(dp) * roundings, max_abs(dweight) * roundings, max_abs(dbias)]


def sample(dtype: torch.dtype = torch.float64, rows: int = 3, **options: Any) -> MultiTokenCase:
    """No size is `rows` or a number of rows that the tests use."""
    form = {"shape": (rows, 2, 4, 4), "kernel": (2, 2), "dilation": (2,), "groups": 2}
    return MultiTokenCase(dtype=dtype, **{**form, **options})


OPS = (
    OpUnderTest(
        name="multi_token_attention_forward",
        tensors=tensors,
        forward_args=forward_args,
        backward_args=backward_args,
        gradients_of=INPUTS,
        # The default of groups is not the sample's.
        needed=7,
        output_magnitudes=output_magnitudes,
        gradient_magnitudes=gradient_magnitudes,
        sample=sample,
        per_row=("scores", "dy"),
        leading=("scores",),
        multiplies=True,
        autocast_as="conv2d",
    ),
)
