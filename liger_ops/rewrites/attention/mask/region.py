"""Regions, which are sets of indices, and proofs that a condition holds in a whole region.

Sizes may be symbolic: a proof holds for every size that the graph is compiled for, and adds no
guard.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...engine.maps.algebra import (
    Affine,
    And,
    Choice,
    Condition,
    NonNegative,
    Not,
    Number,
    Size,
    affine,
    always_true,
    same,
    substitute,
)


@dataclass(frozen=True)
class Frame:
    """A region's indices, written as affine functions of variables with ranges.

    The range of a variable is its lowest value and a tuple of upper bounds, all of which hold.
    """

    indices: Mapping[int, Affine]
    ranges: Mapping[int, tuple[int, tuple[Size, ...]]]

    def proves_nonnegative(self, value: Affine) -> bool:
        """Return whether the least value in the frame is proved to be 0 or more."""
        value = substitute(value, self.indices)
        # Nothing is known of data, nor of quotients.
        if value.terms:
            return False
        # An affine function is least at an end of each range. Every upper bound of a variable gives
        # a lower bound of the value, and one of these lower bounds that is 0 or more is a proof.
        least: list[Any] = [value.constant]
        for variable, slope in value.slopes.items():
            low, highs = self.ranges[variable]
            ends = (low,) if slope > 0 else highs
            least = [constant + slope * end for constant in least for end in ends]
        return any(always_true(constant >= 0) for constant in least)


@dataclass(frozen=True)
class Region:
    """A set of indices, described by one frame or several; a proof in any of these is valid.

    Bounds of each variable alone lose how variables depend on each other. For i - j - 1 with j < i
    they are useless in the variables i and j, and exact in j and t = i - j.
    """

    frames: Sequence[Frame]

    def decide(self, condition: Condition) -> bool | None:
        """Return True if the condition holds in the whole region, False if nowhere in it.

        None means that neither is proved, and not that the condition differs between indices.
        """
        decided_before: dict[int, bool | None] = {}

        def visit(clause: Condition) -> bool | None:
            if isinstance(clause, bool):
                return clause
            if id(clause) not in decided_before:
                decided_before[id(clause)] = decide_part(clause)
            return decided_before[id(clause)]

        def decide_part(clause: NonNegative | Not | And) -> bool | None:
            if isinstance(clause, NonNegative):
                if self.proves_nonnegative(clause.value):
                    return True
                below = affine(-1) - clause.value
                return False if self.proves_nonnegative(below) else None
            if isinstance(clause, Not):
                inner = visit(clause.operand)
                return None if inner is None else not inner
            sides = (visit(clause.left), visit(clause.right))
            if False in sides:
                return False
            return None if None in sides else True

        return visit(condition)

    def proves_nonnegative(self, value: Affine) -> bool:
        """Return whether the value is proved to be 0 or more in the whole region."""
        return any(frame.proves_nonnegative(value) for frame in self.frames)

    def simplified(self, value: Number) -> Number:
        """Return the value without choices that are decided in the whole region."""
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
    """Return the region of all indices of a tensor of this shape."""
    axes = range(-len(shape), 0)
    return Region([Frame({}, {axis: (0, (shape[axis] - 1,)) for axis in axes})])
