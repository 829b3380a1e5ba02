"""multi_token_attention: the sizes of the convolution and of its result."""

from __future__ import annotations

from typing import Any

from ...ops.attention.multi_token_attention import Convolution
from ...ops.attention.windows import per_dimension
from ..checks import op
from ..lines import also, gives


@also("multi_token_attention", first=True)
def convolution(call: Any) -> None:
    """Check the shapes and options from which the size of the result is computed."""
    scores, weight, groups = call.scores, call.weight, call.groups
    if scores.dim() != 4 or scores.shape[2] != scores.shape[3] or scores.shape[2] < 1:
        raise ValueError(
            f"{op(call)}: scores must be (B, C, L, L), with L at least 1, got shape"
            f" {tuple(scores.shape)}"
        )
    if weight.dim() != 4 or 0 in weight.shape:
        raise ValueError(
            f"{op(call)}: weight must be (E, G, P, Q), none of them 0, got shape"
            f" {tuple(weight.shape)}"
        )
    channels = scores.shape[1]
    if groups < 1 or channels % groups != 0 or weight.shape[0] % groups != 0:
        raise ValueError(
            f"{op(call)}: groups must divide the {channels} channels of scores and the"
            f" {weight.shape[0]} rows of weight, got {groups}"
        )
    if weight.shape[1] != channels // groups:
        raise ValueError(
            f"{op(call)}: weight must be (E, {channels // groups}, P, Q) for {channels} channels of"
            f" scores and groups of {groups}, got shape {tuple(weight.shape)}"
        )
    for name, least in (("stride", 1), ("padding", 0), ("dilation", 1)):
        values = per_dimension(getattr(call, name), 2)
        if len(values) != 2 or min(values) < least:
            raise ValueError(
                f"{op(call)}: {name} must be one or two ints of at least {least}, got {values}"
            )
    rows, columns = Convolution.of(call).sizes(scores.shape[2:], weight.shape[2:])
    if rows < 1 or rows != columns:
        raise ValueError(
            f"{op(call)}: weight, stride, padding and dilation must give as many columns as rows,"
            f" and at least 1, got {rows} rows and {columns} columns"
        )


@gives("L'", "multi_token_attention")
def rows_of_result(call: Any) -> tuple[int]:
    return (Convolution.of(call).sizes(call.scores.shape[2:], call.weight.shape[2:])[0],)
