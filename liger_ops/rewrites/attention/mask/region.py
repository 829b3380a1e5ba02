"""Sets of indices, and what is proved of a value in the whole of one.

Sizes may be symbolic: a proof holds for every size that the graph is compiled for, and adds no
guard.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .algebra import (
    Affine,
    Both,
    Choice,
    Condition,
    NonNegative,
    Not,
    Number,
    Size,
    affine,
    at,
    known,
    same,
)


@dataclass(frozen=True)
class Frame:
    """A region's indices, written as affine functions of variables with ranges.

    The range of a variable is its lowest value and a tuple of upper bounds, all of which hold.
    """

    indices: Mapping[int, Affine]
    ranges: Mapping[int, tuple[int, tuple[Size, ...]]]

    def proves_nonnegative(self, value: Affine) -> bool:
        value = at(value, self.indices)
        if value.terms:
            return False
        least: list[Any] = [value.constant]
        for variable, slope in value.slopes.items():
            low, highs = self.ranges[variable]
            ends = (low,) if slope > 0 else highs
            least = [constant + slope * end for constant in least for end in ends]
        return any(known(constant >= 0) for constant in least)


@dataclass(frozen=True)
class Region:
    """A set of indices, described by one frame or several. A proof in any frame is valid."""

    frames: Sequence[Frame]

    def decide(self, condition: Condition) -> bool | None:
        """True if the condition holds in the whole region, False if nowhere, None if unknown."""
        done: dict[int, bool | None] = {}

        def decided(part: Condition) -> bool | None:
            if isinstance(part, bool):
                return part
            if id(part) not in done:
                done[id(part)] = found(part)
            return done[id(part)]

        def found(part: NonNegative | Not | Both) -> bool | None:
            if isinstance(part, NonNegative):
                if self.proves_nonnegative(part.value):
                    return True
                below = affine(-1) - part.value
                return False if self.proves_nonnegative(below) else None
            if isinstance(part, Not):
                inner = decided(part.of)
                return None if inner is None else not inner
            sides = (decided(part.left), decided(part.right))
            if False in sides:
                return False
            return None if None in sides else True

        return decided(condition)

    def proves_nonnegative(self, value: Affine) -> bool:
        return any(frame.proves_nonnegative(value) for frame in self.frames)

    def simplified(self, value: Number) -> Number:
        """The value without choices that are decided in the whole region."""
        if not isinstance(value, Choice):
            return value
        decision = self.decide(value.condition)
        if decision is not None:
            return self.simplified(value.yes if decision else value.no)
        yes, no = self.simplified(value.yes), self.simplified(value.no)
        if isinstance(yes, Affine) and isinstance(no, Affine) and same(yes, no):
            return yes
        return Choice(value.condition, yes, no)


def everywhere(shape: Sequence[Size]) -> Region:
    """All indices of a tensor of this shape."""
    axes = range(-len(shape), 0)
    return Region([Frame({}, {axis: (0, (shape[axis] - 1,)) for axis in axes})])
