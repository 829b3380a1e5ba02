"""Root-mean-square normalisation, as models write it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..engine.canonical import is_tensor, value
from ..engine.pattern import Match, Pattern
from ..engine.rewrite import InDtypesOfInputs, Refused, derive, number


def _widened(x: Tensor, eps: float) -> Tensor:
    wide = x.to(torch.float32)
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)


def _promoted(x: Tensor, eps: float) -> Tensor:
    """The product is float32, because the variance is."""
    return x * torch.rsqrt(x.to(torch.float32).pow(2).mean(-1, keepdim=True) + eps)


def llama(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * _widened(x, eps).to(x.dtype)


def t5(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * _promoted(x, eps).to(x.dtype)


def gemma(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    return (_widened(x, eps) * (offset + weight.to(torch.float32))).to(x.dtype)


def olmo2(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return (weight * _widened(x, eps)).to(x.dtype)


def helium(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return (weight.to(torch.float32) * _widened(x, eps)).to(x.dtype)


def mochi(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return (weight * _promoted(x, eps)).to(x.dtype)


def wide(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`RMSNorm` of diffusers with a float32 weight: the result is float32, whatever x is."""
    return _promoted(x, eps) * weight


def unwidened(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return unweighted_unwidened(x, eps) * weight


def unweighted(x: Tensor, eps: float) -> Tensor:
    return _widened(x, eps).to(x.dtype)


def unweighted_t5(x: Tensor, eps: float) -> Tensor:
    return _promoted(x, eps).to(x.dtype)


def unweighted_unwidened(x: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def torch_rms_norm(x: Tensor, shape: list[int], weight: Tensor | None, eps: float | None) -> Tensor:
    return F.rms_norm(x, shape, weight, eps)


def _op(casting_mode: str, weighted: bool = True, offset: float = 0.0) -> Any:
    def replacement(match: Match) -> tuple[Any, tuple[Any, ...]]:
        weight = match["weight"] if weighted else None
        if weighted and not is_tensor(weight, dim=1):
            shape = tuple(value(weight).shape) if is_tensor(weight) else weight
            raise Refused(f"the weight has the shape {shape}, not that of a row")
        added = number(match["offset"]) if "offset" in match.values else offset
        args = (match["x"], weight, number(match["eps"]), added, casting_mode)
        return torch.ops.liger.rms_norm.default, args

    return InDtypesOfInputs(replacement)


def _of_wide(match: Match) -> tuple[Any, tuple[Any, ...]]:
    target, (x, *rest) = _op("gemma")(match)
    return target, (derive(match.root, torch.Tensor.to, x, torch.float32), *rest)


def _of_torch(match: Match) -> tuple[Any, tuple[Any, ...]]:
    if match["eps"] is None:
        raise Refused("eps=None is the dtype's own epsilon, which the op does not support")
    dimensions = len(value(match["shape"]))
    if dimensions != 1:
        raise Refused(f"it normalises over {dimensions} dimensions, not the last alone")
    # PyTorch returns x's dtype, unless autocast has cast both to float32, as it casts the op's.
    dtypes = {value(one).dtype for one in (match["x"], match["weight"]) if one is not None}
    is_cast = value(match.root).dtype == torch.float32 and torch.float64 not in dtypes
    if len(dtypes) > 1 and not is_cast:
        raise Refused("the weight is not of the dtype of x")
    args = (match["x"], match["weight"], number(match["eps"]), 0.0, "gemma")
    return torch.ops.liger.rms_norm.default, args


_ROWS: dict[str, Any] = {"x": (2, 3, 8), "eps": 1e-6}
_WEIGHTED = {**_ROWS, "weight": (8,)}
SPELLINGS = [
    (Pattern(torch_rms_norm, x=(2, 3, 8), shape=[8], weight=(8,), eps=1e-6), _of_torch),
    # Before llama, whose weight would match the sum, in float32.
    (Pattern(gemma, **_WEIGHTED, offset=1.0), _op("gemma")),
    (Pattern(llama, **_WEIGHTED), _op("llama")),
    (Pattern(t5, **_WEIGHTED), _op("llama")),
    (Pattern(olmo2, **_WEIGHTED), _op("gemma")),
    (Pattern(helium, **_WEIGHTED), _op("gemma")),
    (Pattern(mochi, **_WEIGHTED), _op("gemma")),
    (Pattern(unwidened, **_WEIGHTED), _op("none")),
    (Pattern(wide, **_WEIGHTED), _of_wide),
    (Pattern(unweighted, **_ROWS), _op("gemma", weighted=False)),
    (Pattern(unweighted_t5, **_ROWS), _op("gemma", weighted=False)),
    (Pattern(unweighted_unwidened, **_ROWS), _op("none", weighted=False)),
]
