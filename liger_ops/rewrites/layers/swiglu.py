"""SwiGLU, as models write it. The halves of a packed projection are views, and are not copied.

The ops of gated activations compute in float32 and round once. Eager code in a narrower dtype
rounds the activation before the product; compiled by Inductor, it does not either.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..engine.canonical import value
from ..engine.pattern import Match, Pattern
from ..engine.rewrite import before_widening, number, of_one_shape


def llama(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def beam(gate: Tensor, up: Tensor) -> Tensor:
    return (F.silu(gate.to(torch.float32)) * up.to(torch.float32)).to(gate.dtype)


def lumina(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate.to(torch.float32)).to(gate.dtype) * up


def falcon_h1(gate: Tensor, up: Tensor, multiplier: float) -> Tensor:
    return up * F.silu(gate * multiplier)


def _op(match: Match) -> tuple[Any, tuple[Any, ...]]:
    # Only `beam` widens both, and one of them may have been matched after its cast.
    gate, up = match["gate"], match["up"]
    if value(gate).dtype != value(up).dtype:
        gate, up = before_widening(gate), before_widening(up)
    of_one_shape(gate, up)
    multiplier = number(match["multiplier"]) if "multiplier" in match.values else 1.0
    return torch.ops.liger.swiglu.default, (gate, up, multiplier)


_HALVES: dict[str, Any] = {"gate": (2, 3, 8), "up": (2, 3, 8)}
SPELLINGS = [
    (Pattern(falcon_h1, **_HALVES, multiplier=0.5), _op),
    (Pattern(beam, **_HALVES), _op),
    (Pattern(lumina, **_HALVES), _op),
    (Pattern(llama, **_HALVES), _op),
]
