"""Layer normalisation over the last dimension and group normalisation, as models write them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..engine.canonical import is_tensor, value
from ..engine.pattern import Match, Pattern
from ..engine.rewrite import InDtypesOfInputs, Refused, Replacement, number


def torch_layer_norm(
    x: Tensor, shape: list[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    return F.layer_norm(x, shape, weight, bias, eps)


def widened(x: Tensor, shape: list[int], weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    wide = x.to(torch.float32)
    y = F.layer_norm(wide, shape, weight.to(torch.float32), bias.to(torch.float32), eps)
    return y.to(x.dtype)


def widened_unweighted(x: Tensor, shape: list[int], eps: float) -> Tensor:
    return F.layer_norm(x.to(torch.float32), shape, None, None, eps).to(x.dtype)


def cohere(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.to(torch.float32)
    mean = wide.mean(-1, keepdim=True)
    variance = (wide - mean).pow(2).mean(-1, keepdim=True)
    wide = (wide - mean) * torch.rsqrt(variance + eps)
    return (weight.to(torch.float32) * wide).to(x.dtype)


def torch_group_norm(
    x: Tensor, num_groups: int, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    return F.group_norm(x, num_groups, weight, bias, eps)


def _of_torch(match: Match) -> tuple[Any, tuple[Any, ...]]:
    dimensions = len(value(match["shape"]))
    if dimensions != 1:
        raise Refused(f"it normalises over {dimensions} dimensions, not the last alone")
    weight, bias = match.values.get("weight"), match.values.get("bias")
    return torch.ops.liger.layer_norm.default, (match["x"], weight, bias, number(match["eps"]))


def _of_cohere(match: Match) -> tuple[Any, tuple[Any, ...]]:
    if not is_tensor(match["weight"], dim=1):
        raise Refused("the weight is not that of a row")
    args = (match["x"], match["weight"], None, number(match["eps"]))
    return torch.ops.liger.layer_norm.default, args


def _of_groups(match: Match) -> tuple[Any, tuple[Any, ...]]:
    args = (match["x"], match["num_groups"], match["weight"], match["bias"], number(match["eps"]))
    return torch.ops.liger.group_norm.default, args


_ROWS: dict[str, Any] = {"x": (2, 3, 8), "weight": (8,), "eps": 1e-5}
_SHAPED: dict[str, Any] = {**_ROWS, "shape": [8]}
SPELLINGS: list[tuple[Pattern, Replacement]] = [
    (Pattern(widened, **_SHAPED, bias=(8,)), _of_torch),
    (Pattern(widened_unweighted, x=(2, 3, 8), shape=[8], eps=1e-5), _of_torch),
    (Pattern(torch_layer_norm, **_SHAPED, bias=(8,)), _of_torch),
    (Pattern(cohere, **_ROWS), InDtypesOfInputs(_of_cohere)),
]
_GROUPED = Pattern(torch_group_norm, x=(2, 8, 3), num_groups=4, weight=(8,), bias=(8,), eps=1e-5)
GROUP_NORM = [(_GROUPED, _of_groups)]
