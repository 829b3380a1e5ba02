"""The squared ReLU of Nemotron."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from .pattern import Match, Pattern
from .report import Report
from .rewrite import replace_all


def nemotron(x: Tensor) -> Tensor:
    return torch.square(F.relu(x))


def rewrite(graph: fx.Graph, report: Report) -> None:
    replace_all(graph, report, "relu_squared", SPELLINGS)


def _op(match: Match) -> tuple[Any, tuple[Any, ...]]:
    return torch.ops.liger.relu_squared.default, (match["x"],)


SPELLINGS = [(Pattern(nemotron, x=(2, 3, 8)), _op)]
