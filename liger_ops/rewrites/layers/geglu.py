"""GEGLU, as models write it, with the exact GELU and with its approximation by tanh."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..engine.pattern import Match, Pattern
from ..engine.rewrite import Refused, of_one_shape


def gemma(gate: Tensor, up: Tensor, approximate: str) -> Tensor:
    return F.gelu(gate, approximate=approximate) * up


def new_gelu(gate: Tensor, up: Tensor) -> Tensor:
    inner = math.sqrt(2.0 / math.pi) * (gate + 0.044715 * torch.pow(gate, 3.0))
    return 0.5 * gate * (1.0 + torch.tanh(inner)) * up


def _op(match: Match) -> tuple[Any, tuple[Any, ...]]:
    of_one_shape(match["gate"], match["up"])
    approximate = match.values.get("approximate", "tanh")
    if approximate not in ("tanh", "none"):
        raise Refused(f"approximate is {approximate!r}")
    return torch.ops.liger.geglu.default, (match["gate"], match["up"], approximate)


_HALVES: dict[str, Any] = {"gate": (2, 3, 8), "up": (2, 3, 8)}
SPELLINGS: list[Any] = [
    (Pattern(gemma, **_HALVES, approximate="tanh"), _op),
    (Pattern(new_gelu, **_HALVES), _op),
]
