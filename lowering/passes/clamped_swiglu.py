"""The clamped SwiGLU of GPT-OSS."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from .canonical import same, value
from .pattern import Match, Pattern
from .report import Report
from .rewrite import Refused, number, of_one_shape, replace_all


def gpt_oss(
    gate: Tensor, up: Tensor, limit: float, lower: float, alpha: float, up_offset: float
) -> Tensor:
    gate = gate.clamp(min=None, max=limit)
    up = up.clamp(min=lower, max=limit)
    glu = gate * torch.sigmoid(gate * alpha)
    return (up + up_offset) * glu


def rewrite(graph: fx.Graph, report: Report) -> None:
    replace_all(graph, report, "clamped_swiglu", SPELLINGS)


def _op(match: Match) -> tuple[Any, tuple[Any, ...]]:
    of_one_shape(match["gate"], match["up"])
    limit, lower = number(match["limit"]), number(match["lower"])
    if not same(value(lower), -value(limit)):
        raise Refused("up is clamped to other bounds than -limit and limit")
    return torch.ops.liger.clamped_swiglu.default, (
        match["gate"],
        match["up"],
        number(match["alpha"]),
        limit,
        number(match["up_offset"]),
    )


SPELLINGS = [
    (
        Pattern(
            gpt_oss,
            gate=(2, 3, 8),
            up=(2, 3, 8),
            limit=7.0,
            lower=-7.0,
            alpha=1.702,
            up_offset=1.0,
        ),
        _op,
    )
]
