"""Queries that see no key: attention gives them the mean of all values, as the model's code does.

Code that adds a finite number c to hidden scores gives such a query the same weight for every key:
c is so low that every score + c rounds to c. The gradient of a sum does not see the rounding, so
the scores still have a gradient. flex_attention computes the same if the query sees all keys, and
if its scores are rounded in the same way, to 0 instead of c: the logarithm of a sum of exponentials
of c would lose the number of keys.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ...engine.maps.algebra import Condition, Datum, affine, always_true, at_least, index
from .blocks import AXES

# Scores are far below its rounding error, in float64 too: score + LARGE is LARGE.
LARGE = 1e30


def is_unseen(unseen: fx.Node) -> Condition:
    """Return the condition that a query sees no key, read from the boolean tensor `unseen`."""
    shape = unseen.meta["example_value"].shape
    indices = tuple(
        affine(0) if always_true(size == 1) else index(axis)
        for axis, size in zip(AXES[:-1], shape, strict=True)
    )
    return at_least(affine(0, {}, {Datum(unseen, indices): 1}), affine(1))


def rounded_to_zero(score: Any, unseen: Any) -> Any:
    """Return the score, or 0 with the score's gradient where `unseen` is true.

    Arithmetic, and not torch.where, which would give the score no gradient.
    """
    large = unseen * LARGE
    return (score + large) - large


def read_at(unseen: Any, indices: tuple[Any, ...], like: torch.Tensor) -> Any:
    """Return the element of `unseen`, which has the shape of `like`, at the indices b, h and i."""
    pairs = zip(indices, like.shape, strict=True)
    return unseen[tuple(index * 0 if always_true(size == 1) else index for index, size in pairs)]
