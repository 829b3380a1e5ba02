"""Whether a mask is causal: query i sees exactly the keys j <= i."""

from __future__ import annotations

from collections.abc import Sequence

from .algebra import (
    Affine,
    Condition,
    Frame,
    Region,
    Size,
    Unknown,
    Value,
    index,
    is_condition,
    known,
    lift,
)


def visible_keys(mask: Value) -> Condition:
    """The condition under which a mask lets a query see a key.

    Raises:
        Unknown: the mask adds something other than 0 and a very low number.
    """
    if is_condition(mask):
        return mask

    def leaf_is_visible(leaf: Affine) -> Condition:
        # In float32 exp(score - largest score) is 0 from -104 on, and no score comes near -1e30.
        # The lowest float16, -65504, is not that far from real scores.
        if not leaf.slopes and leaf.constant == 0.0:
            return True
        if not leaf.slopes and isinstance(leaf.constant, float) and leaf.constant <= -1e30:
            return False
        raise Unknown("it adds something other than 0 and minus infinity")

    return lift(leaf_is_visible, mask)


def departure(visible: Condition, shape: Sequence[Size]) -> str | None:
    """How `visible` may differ from j <= i, for query i and key j; None if it is the same.

    The three regions are the keys before the diagonal, the diagonal, and the keys after it.
    """
    # t, a variable that is no axis, is the distance between i and j: at least 1 off the diagonal.
    i, j, t = -2, -1, 0
    queries, keys = shape[i], shape[j]
    others = {axis: (0, (shape[axis] - 1,)) for axis in range(-len(shape), i)}

    def region(lower: int, upper: int) -> Region:
        """index[upper] = index[lower] + t with t >= 1, written in each pair of variables."""
        most = {i: queries - 1, j: keys - 1}
        ranges: dict[int, tuple[int, tuple[Size, ...]]] = {
            **others,
            lower: (0, (most[lower], most[upper] - 1)),
            upper: (1, (most[upper],)),
            t: (1, (most[upper],)),
        }
        by_lower = {upper: index(lower) + index(t)}
        by_upper = {lower: index(upper) - index(t)}
        return Region([Frame({}, ranges), Frame(by_lower, ranges), Frame(by_upper, ranges)])

    diagonal = Region([Frame({j: index(i)}, {**others, i: (0, (queries - 1, keys - 1))})])
    earlier = known(queries <= 1) or region(lower=j, upper=i).decide(visible)
    if earlier is not True:
        return "its mask may hide an earlier key, as a sliding window does"
    if diagonal.decide(visible) is not True:
        return "its mask may hide a query's own key"
    if not known(keys <= 1) and region(lower=i, upper=j).decide(visible) is not False:
        return "its mask may show a later key"
    return None
