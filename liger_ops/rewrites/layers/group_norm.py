"""Group normalisation, as torch.nn.functional has it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..engine.pattern import Match, Pattern
from ..engine.rewrite import number


def torch_group_norm(
    x: Tensor, num_groups: int, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    return F.group_norm(x, num_groups, weight, bias, eps)


def _op(match: Match) -> tuple[Any, tuple[Any, ...]]:
    args = (match["x"], match["num_groups"], match["weight"], match["bias"], number(match["eps"]))
    return torch.ops.liger.group_norm.default, args


SPELLINGS = [
    (Pattern(torch_group_norm, x=(2, 8, 3), num_groups=4, weight=(8,), bias=(8,), eps=1e-5), _op)
]
