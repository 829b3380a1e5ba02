"""The clamped SwiGLU of GPT-OSS and DeepSeek-V4, and what is one without a limit."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from ..engine.canonical import same, value
from ..engine.pattern import Match, Pattern
from ..engine.report import Report
from ..engine.rewrite import Refused, number, of_one_shape, replace_all


def gpt_oss(
    gate: Tensor, up: Tensor, limit: float, lower: float, alpha: float, up_offset: float
) -> Tensor:
    gate = gate.clamp(min=None, max=limit)
    up = up.clamp(min=lower, max=limit)
    glu = gate * torch.sigmoid(gate * alpha)
    return (up + up_offset) * glu


def deepseek_v4(gate: Tensor, up: Tensor, limit: float, lower: float) -> Tensor:
    gate = gate.clamp(min=None, max=limit)
    up = up.clamp(min=lower, max=limit)
    return F.silu(gate) * up


def quick_gelu(gate: Tensor, up: Tensor, alpha: float) -> Tensor:
    return gate * torch.sigmoid(gate * alpha) * up


def rewrite_unlimited(graph: fx.Graph, report: Report) -> None:
    """The same without a limit, which the backend leaves to Inductor and `fuse` does not."""
    replace_all(graph, report, "clamped_swiglu", UNLIMITED)


def _op(match: Match) -> tuple[Any, tuple[Any, ...]]:
    of_one_shape(match["gate"], match["up"])
    limit = number(match.values.get("limit", math.inf))
    if "lower" in match.values and not same(value(number(match["lower"])), -value(limit)):
        raise Refused("up is clamped to other bounds than -limit and limit")
    alpha, up_offset = (match.values.get(*one) for one in (("alpha", 1.0), ("up_offset", 0.0)))
    args = (match["gate"], match["up"], number(alpha), limit, number(up_offset))
    return torch.ops.liger.clamped_swiglu.default, args


_HALVES: dict[str, Any] = {"gate": (2, 3, 8), "up": (2, 3, 8)}
_LIMITS: dict[str, Any] = {"limit": 7.0, "lower": -7.0}
SPELLINGS = [
    (Pattern(gpt_oss, **_HALVES, **_LIMITS, alpha=1.702, up_offset=1.0), _op),
    (Pattern(deepseek_v4, **_HALVES, **_LIMITS), _op),
]
UNLIMITED = [(Pattern(quick_gelu, **_HALVES, alpha=1.702), _op)]
