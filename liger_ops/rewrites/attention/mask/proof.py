"""Proofs that query i sees exactly the keys j <= i, or a sliding window of these."""

from __future__ import annotations

from collections.abc import Sequence

from ...engine.maps.algebra import (
    Affine,
    Condition,
    Size,
    Unknown,
    Value,
    affine,
    always_true,
    comparisons,
    index,
    is_condition,
    lift,
)
from .region import Frame, Region

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
