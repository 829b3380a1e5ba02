"""SwiGLU, as models write it. The halves of a packed projection are views, and are not copied.

The ops of gated activations compute in float32 and round once. Eager code in a narrower dtype
rounds the activation before the product; compiled by Inductor, it does not either.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from .pattern import Match, Pattern
from .report import Report
from .rewrite import number, of_one_shape, replace_all


def llama(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def falcon_h1(gate: Tensor, up: Tensor, multiplier: float) -> Tensor:
    return up * F.silu(gate * multiplier)


def rewrite(graph: fx.Graph, report: Report) -> None:
    replace_all(graph, report, "swiglu", SPELLINGS)


def _op(match: Match) -> tuple[Any, tuple[Any, ...]]:
    of_one_shape(match["gate"], match["up"])
    multiplier = number(match["multiplier"]) if "multiplier" in match.values else 1.0
    return torch.ops.liger.swiglu.default, (match["gate"], match["up"], multiplier)


_HALVES: dict[str, Any] = {"gate": (2, 3, 8), "up": (2, 3, 8)}
SPELLINGS = [
    (Pattern(falcon_h1, **_HALVES, multiplier=0.5), _op),
    (Pattern(llama, **_HALVES), _op),
]
