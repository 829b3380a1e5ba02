"""multi_token_attention: checks and outputs."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ... import library
from ...ops.attention.multi_token_attention import Convolution
from ...ops.attention.windows import per_dimension
from .. import checks


@library.fake("multi_token_attention_forward")
def multi_token_attention_forward(call: Any) -> Tensor:
    shape = _shape_of_result(call)
    return call.scores.new_empty(shape, dtype=call.weight.dtype, requires_grad=False)


@library.fake("multi_token_attention_backward")
def multi_token_attention_backward(call: Any) -> tuple[Tensor | None, ...]:
    shape = _shape_of_result(call)
    checks.floating(call, "dy")
    checks.same_device(call, "scores", "dy")
    checks.shape(call, "dy", shape, "the result")
    return checks.gradients(call, "scores", "weight", "bias")


def _shape_of_result(call: Any) -> tuple[int, ...]:
    """Check a call's arguments; return the shape of its result."""
    op, scores, weight, bias = checks.op(call), call.scores, call.weight, call.bias
    checks.floating(call, "scores", "weight", "bias")
    if bias is not None and bias.dtype != weight.dtype:
        raise TypeError(f"{op}: bias must have weight's dtype, {weight.dtype}, got {bias.dtype}")
    if scores.dim() != 4 or scores.shape[2] != scores.shape[3] or scores.shape[2] < 1:
        raise ValueError(
            f"{op}: scores must be (B, C, L, L), with L at least 1, got shape {tuple(scores.shape)}"
        )
    checks.same_device(call, "scores", "weight", "bias")
    if weight.dim() != 4 or 0 in weight.shape:
        raise ValueError(
            f"{op}: weight must be (C_out, C / groups, K_i, K_j), none of them 0, got shape"
            f" {tuple(weight.shape)}"
        )
    checks.shape(call, "bias", weight.shape[:1], "weight's first dimension")
    groups, channels = call.groups, scores.shape[1]
    if groups < 1 or channels % groups != 0 or weight.shape[0] % groups != 0:
        raise ValueError(
            f"{op}: groups must divide the {channels} channels of scores and the"
            f" {weight.shape[0]} rows of weight, got {groups}"
        )
    kernel = weight.shape[2:]
    checks.shape(call, "weight", (weight.shape[0], channels // groups, *kernel), "scores' channels")
    for name, least in (("stride", 1), ("padding", 0), ("dilation", 1)):
        values = per_dimension(getattr(call, name), 2)
        if len(values) != 2 or min(values) < least:
            raise ValueError(
                f"{op}: {name} must be one or two ints of at least {least}, got {values}"
            )
    rows, columns = Convolution.of(call).sizes(scores.shape[2:], kernel)
    if rows < 1 or rows != columns:
        raise ValueError(
            f"{op}: weight, stride, padding and dilation must give as many columns as rows, and at"
            f" least 1, got {rows} rows and {columns} columns"
        )
    return (scores.shape[0], weight.shape[0], rows, columns)
