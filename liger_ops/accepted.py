"""Conditions on the values of an op's options, for `library.define`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple


class Accepted(NamedTuple):
    """A condition on the value of an option, and its description in messages."""

    text: str
    holds: Callable[[Any], bool]


# Option -> the values that it accepts: a condition, or a list of strings. None is never checked.
Options = Mapping[str, Accepted | Sequence[str]]

AT_LEAST_0 = Accepted("a number of at least 0", lambda value: value >= 0)
FINITE_AT_LEAST_0 = Accepted("a number of at least 0", lambda value: 0 <= value < float("inf"))
AT_LEAST_1 = Accepted("at least 1", lambda value: value >= 1)
# For a number of bytes.
ABOVE_0 = Accepted("above 0 or None", lambda value: value >= 1)
POSITIVE = Accepted("a number above 0", lambda value: 0 < value < float("inf"))
FINITE = Accepted("a finite number", math.isfinite)
FRACTION = Accepted("from 0 to 1", lambda value: 0 <= value <= 1)


# The smallest normal and the largest finite number of float32.
_SMALLEST, _LARGEST = 2.0**-126, 2.0**128 - 2.0**104


def is_scale(number: float | None) -> bool:
    """Return whether scores or logits may be scaled or capped by a number: it is positive, and
    normal and finite in float32.

    Attention kernels disagree about other numbers. Flash attention masks scores before it scales
    them, and subtracts their maximum before it does so: minus infinity times a negative number is
    infinity, and times 0 it is NaN. PyTorch's attention on the CPU gives NaN for is_causal=True
    with a scale of 0 or less.
    """
    return number is not None and _SMALLEST <= number <= _LARGEST


def one_of(values: Any) -> Accepted:
    """Return the condition that a value is one of `values`."""
    return Accepted(f"one of {', '.join(map(repr, values))}", lambda value: value in values)
