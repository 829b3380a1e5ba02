"""The squared ReLU of Nemotron."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..engine.canonical import value
from ..engine.pattern import Match, Pattern
from ..engine.rewrite import Refused


def nemotron(x: Tensor) -> Tensor:
    return torch.square(F.relu(x))


def _op(match: Match) -> tuple[Any, tuple[Any, ...]]:
    if not value(match["x"]).is_floating_point():
        raise Refused("x is of integers")
    return torch.ops.liger.relu_squared.default, (match["x"],)


SPELLINGS = [(Pattern(nemotron, x=(2, 3, 8)), _op)]
