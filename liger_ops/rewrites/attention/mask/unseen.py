"""The queries that see no key, and attention that is the mean of the values there.

Code that adds a finite number c to hidden scores gives such a query the same weight for every key:
c is so low that every score + c rounds to c. The gradient of a sum does not see the rounding, so
the scores get their share of it. flex_attention computes that if the query sees all keys, and if
its scores are rounded in the same way, to 0 instead of c: the logarithm of a sum of exponentials of
c would lose the number of keys.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from .algebra import Condition, Datum, affine, at_least, index, known
from .blocks import AXES

# Scores are far below its rounding error, in float64 too.
LARGE = 1e30


def is_unseen(unseen: fx.Node) -> Condition:
    """The condition that a query is one of them."""
    shape = unseen.meta["example_value"].shape
    places = tuple(
        affine(0) if known(size == 1) else index(axis)
        for axis, size in zip(AXES[:-1], shape, strict=True)
    )
    return at_least(affine(0, {}, {Datum(unseen, places): 1}), affine(1))


def rounded(score: Any, unseen: Any) -> Any:
    """The score, rounded to 0 where `unseen` is true, with the gradient of the score."""
    large = unseen * LARGE
    return (score + large) - large


def read_at(unseen: Any, indices: tuple[Any, ...], like: torch.Tensor) -> Any:
    """The element of `unseen`, which has the shape of `like`, for the indices b, h and i."""
    places = zip(indices, like.shape, strict=True)
    return unseen[tuple(place * 0 if known(size == 1) else place for place, size in places)]
