"""Proofs that query i sees exactly the keys j <= i, or a sliding window of these.

A region is a set of indices, and a condition is proved to hold in a whole region. Sizes may be
symbolic: a proof holds for every size that the graph is compiled for, and adds no guard.
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
    Unknown,
    Value,
    affine,
    always_true,
    comparisons,
    index,
    is_condition,
    lift,
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


QUERY, KEY = -2, -1


def visible_keys(mask: Value) -> Condition:
    """Return the condition under which a mask of scaled_dot_product_attention shows a key.

    A boolean mask is that condition; a mask of numbers is added to the scores.

    Raises:
        Unknown: the mask adds something other than 0 and a very low number.
    """
    if is_condition(mask):
        return mask

    def leaf_is_visible(leaf: Affine) -> Condition:
        # In float32 exp(score - largest score) is 0 from -104 on, and no score comes near -1e30.
        # The lowest float16, -65504, is not that far from real scores.
        if leaf.is_constant and leaf.constant == 0.0:
            return True
        if leaf.is_constant and isinstance(leaf.constant, float) and leaf.constant <= -1e30:
            return False
        raise Unknown("it adds something other than 0 and minus infinity")

    return lift(leaf_is_visible, mask)


def departure(visible: Condition, shape: Sequence[Size], size: int | None = None) -> str | None:
    """Return how `visible` may differ from j <= i, for query i and key j; None if it is the same.

    With `size` it is compared with j <= i and i - j < size. The regions of the proof are the keys
    before the diagonal (of the window, with `size`), the diagonal, the keys after it, and the keys
    before the window.
    """
    queries, keys = shape[QUERY], shape[KEY]
    last = None if size is None else size - 1
    is_first = always_true(queries <= 1) or last == 0
    if not is_first and _off_diagonal(shape, KEY, QUERY, 1, last).decide(visible) is not True:
        return "its mask may hide an earlier key, as a sliding window does"
    if _diagonal(shape).decide(visible) is not True:
        return "its mask may hide a query's own key"
    if (
        not always_true(keys <= 1)
        and _off_diagonal(shape, QUERY, KEY, 1).decide(visible) is not False
    ):
        return "its mask may show a later key"
    if size is not None and _off_diagonal(shape, KEY, QUERY, size).decide(visible) is not False:
        return "its mask may show a key before the window"
    return None


def window(visible: Condition, shape: Sequence[Size]) -> int | None:
    """Return the number w for which `visible` is proved to be j <= i and i - j < w, or None."""
    sizes = _window_sizes(visible) if always_true(shape[QUERY] > 1) else []
    return next((size for size in sizes if departure(visible, shape, size) is None), None)


def sees_a_key(visible: Condition, shape: Sequence[Size]) -> bool:
    """Return whether every query is proved to see the first key, or every query its own key."""
    ranges = {**_outer_ranges(shape), QUERY: (0, (shape[QUERY] - 1,))}
    first = Region([Frame({KEY: affine(0)}, ranges)])
    sees_itself = (
        always_true(shape[QUERY] <= shape[KEY]) and _diagonal(shape).decide(visible) is True
    )
    return sees_itself or first.decide(visible) is True


def _window_sizes(visible: Condition) -> list[int]:
    """Return each w for which i - j < w or i - j >= w is a comparison of the condition."""
    sizes = set()
    for comparison in comparisons(visible):
        constant, slopes = comparison.value.constant, comparison.value.slopes
        if isinstance(constant, int) and {abs(slope) for slope in slopes.values()} == {1}:
            sizes |= {constant + 1, -constant}
    return sorted(size for size in sizes if size >= 1)


def _diagonal(shape: Sequence[Size]) -> Region:
    """Return the region of j = i."""
    ends = (shape[QUERY] - 1, shape[KEY] - 1)
    return Region([Frame({KEY: index(QUERY)}, {**_outer_ranges(shape), QUERY: (0, ends)})])


def _off_diagonal(
    shape: Sequence[Size], lower: int, upper: int, least: int, most: int | None = None
) -> Region:
    """Return the region of index[upper] = index[lower] + t, with least <= t <= most.

    t, a variable that is no axis, is the distance between i and j. The frames have the variables i
    and j, the lower and t, and the upper and t: `Region` says why.
    """
    t = 0
    last = {axis: shape[axis] - 1 for axis in (QUERY, KEY)}
    ranges: dict[int, tuple[int, tuple[Size, ...]]] = {
        **_outer_ranges(shape),
        lower: (0, (last[lower], last[upper] - least)),
        upper: (least, (last[upper],)),
        t: (least, (last[upper], *([] if most is None else [most]))),
    }
    by_lower = {upper: index(lower) + index(t)}
    by_upper = {lower: index(upper) - index(t)}
    return Region([Frame({}, ranges), Frame(by_lower, ranges), Frame(by_upper, ranges)])


def _outer_ranges(shape: Sequence[Size]) -> dict[int, tuple[int, tuple[Size, ...]]]:
    """Return the ranges of the axes before the queries: batch and heads."""
    return {axis: (0, (shape[axis] - 1,)) for axis in range(-len(shape), QUERY)}
