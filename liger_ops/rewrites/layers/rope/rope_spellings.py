"""The ways in which models write rotary position embedding of one tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...engine.pattern import Matcher, Pattern
from .rotation import Form, Reader


def pe_audio(
    x: Tensor, cos: Tensor, sin: Tensor, heads: int, columns: list[int], matrices: list[int]
) -> Tensor:
    rotations = torch.stack((cos, -sin, sin, cos), dim=-1).view(matrices).unsqueeze(heads)
    return (x.reshape(columns) * rotations).sum(-1).flatten(3)


def flux(x: Tensor, cos: Tensor, columns: list[int], whole: list[int]) -> Tensor:
    numbers = x.float().reshape(columns)
    products = cos[..., 0] * numbers[..., 0] + cos[..., 1] * numbers[..., 1]
    return products.reshape(whole).type_as(x)


# The shapes that the parameters of these names must have, for x and cos of given shapes. A view by
# another shape would regroup the elements.
VIEWS: dict[str, Callable[[torch.Size, torch.Size], tuple[Any, ...]]] = {
    "columns": lambda x, cos: (*x[:-1], x[-1] // 2, 1, 2),
    "whole": lambda x, cos: x,
    "matrices": lambda x, cos: (*cos, 2, 2),
}

_X: dict[str, Any] = {"any_casts": True, "x": (2, 5, 3, 8), "columns": [2, 5, 3, 4, 1, 2]}
_PE_AUDIO = Pattern(pe_audio, **_X, cos=(1, 3, 4), sin=(1, 3, 4), heads=1, matrices=[1, 3, 4, 2, 2])
_FLUX = Pattern(flux, **_X, cos=(1, 1, 3, 4, 2, 2), whole=[2, 5, 3, 8])
# A match of a reader has a form of its own.
SPELLINGS: list[tuple[Matcher, Form | None]] = [
    *((Reader(op, from_pairs), None) for from_pairs in (True, False) for op in Reader.OPS),
    (_PE_AUDIO, Form(interleaved=True, per_pair=True, inner=2)),
    (_FLUX, Form(inner=2)),
]
