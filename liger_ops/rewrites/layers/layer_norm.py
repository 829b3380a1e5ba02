"""Layer normalisation over the last dimension and group normalisation, as models write them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..engine.canonical import is_tensor, value
from ..engine.insertion import Refused
from ..engine.pattern import Match, Pattern
from ..engine.rewrite import InDtypesOfInputs, Replacement, number


def widened(
    input: Tensor, normalized_shape: list[int], eps: float,
    weight: Tensor | None = None, bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    weight, bias = (w if w is None else w.to(torch.float32) for w in (weight, bias))
    wide = input.to(torch.float32)
    return F.layer_norm(wide, normalized_shape, weight, bias, eps).to(input.dtype)


def cohere(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.to(torch.float32)
    mean = wide.mean(-1, keepdim=True)
    variance = (wide - mean).pow(2).mean(-1, keepdim=True)
    wide = (wide - mean) * torch.rsqrt(variance + eps)
    return (weight.to(torch.float32) * wide).to(x.dtype)


def _torch_op(match: Match) -> tuple[Any, tuple[Any, ...]]:
    dimensions = len(value(match["normalized_shape"]))
    if dimensions != 1:
        raise Refused(f"it normalises over {dimensions} dimensions, not the last alone")
    weight, bias = match.values.get("weight"), match.values.get("bias")
    return torch.ops.liger.layer_norm.default, (match["input"], weight, bias, number(match["eps"]))


def _cohere_op(match: Match) -> tuple[Any, tuple[Any, ...]]:
    if not is_tensor(match["weight"], dim=1):
        raise Refused("the weight is not that of a row")
    args = (match["x"], match["weight"], None, number(match["eps"]))
    return torch.ops.liger.layer_norm.default, args


def _group_norm_op(match: Match) -> tuple[Any, tuple[Any, ...]]:
    args = (match[name] for name in ("input", "num_groups", "weight", "bias"))
    return torch.ops.liger.group_norm.default, (*args, number(match["eps"]))


_ROWS: dict[str, Any] = {"input": (2, 3, 8), "normalized_shape": [8], "eps": 1e-5}
_WEIGHTED: dict[str, Any] = {"weight": (8,), "bias": (8,)}
SPELLINGS: list[tuple[Pattern, Replacement]] = [
    (Pattern(widened, **_ROWS, **_WEIGHTED), _torch_op),
    (Pattern(widened, **_ROWS), _torch_op),
    (Pattern(F.layer_norm, **_ROWS, **_WEIGHTED), _torch_op),
    (Pattern(cohere, x=(2, 3, 8), weight=(8,), eps=1e-5), InDtypesOfInputs(_cohere_op)),
]
_GROUPED = Pattern(F.group_norm, input=(2, 8, 3), num_groups=4, **_WEIGHTED, eps=1e-5)
GROUP_NORM = [(_GROUPED, _group_norm_op)]
