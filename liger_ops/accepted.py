"""Numbers that options accept, as `library.define` is given them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple


class Accepted(NamedTuple):
    """A condition, and how messages describe it."""

    text: str
    holds: Callable[[Any], bool]


# Option -> the values that it may have: a condition, or the strings. None is no value.
Options = Mapping[str, Accepted | Sequence[str]]

AT_LEAST_0 = Accepted("a number of at least 0", lambda value: value >= 0)
FINITE_AT_LEAST_0 = Accepted("a number of at least 0", lambda value: 0 <= value < float("inf"))
AT_LEAST_1 = Accepted("at least 1", lambda value: value >= 1)
# Numbers of bytes.
ABOVE_0 = Accepted("above 0 or None", lambda value: value >= 1)
POSITIVE = Accepted("a number above 0", lambda value: 0 < value < float("inf"))
FINITE = Accepted("a finite number", math.isfinite)
FRACTION = Accepted("from 0 to 1", lambda value: 0 <= value <= 1)


# The smallest normal number of float32, and the largest.
_LEAST, _MOST = 2.0**-126, 2.0**128 - 2.0**104


def is_scale(number: float | None) -> bool:
    """Whether an op or an engine of attention may multiply scores or logits by a number, or cap
    them: it is positive and finite, in float32 too.

    Engines of attention differ for others. Flash attention hides scores before it scales them, and
    subtracts the largest before: minus infinity times a negative number is infinite, and times 0 it
    is NaN. PyTorch's attention on the CPU is NaN for is_causal=True with a scale of 0 or less.
    """
    return number is not None and _LEAST <= number <= _MOST


def one_of(values: Any) -> Accepted:
    """The accepted values of a string."""
    return Accepted(f"one of {', '.join(map(repr, values))}", lambda value: value in values)
