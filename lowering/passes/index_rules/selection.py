"""What takes some of the elements, by slices or by known places."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from ..canonical import value as traced
from ..index_algebra import (
    Affine,
    Size,
    Unknown,
    Value,
    affine,
    at,
    at_least,
    axes_of,
    both,
    everywhere,
    index,
    known,
)
from ..index_function import IndexFunctions, rule, shape_of, size


@rule("getitem")
def _getitem(of: IndexFunctions, node: fx.Node, x: Any, items: Any) -> Value:
    items = tuple(items) if isinstance(items, (tuple, list)) else (items,)
    if any(isinstance(traced(item), Tensor) for item in items):
        return _gathered(of, node, x, items)
    sizes = shape_of(x)
    taken = sum(item is not None and item is not Ellipsis for item in items)
    rest = (slice(None),) * (len(sizes) - taken)
    if Ellipsis in items:
        place = items.index(Ellipsis)
        items = (*items[:place], *rest, *items[place + 1 :])
    else:
        items = (*items, *rest)
    places: dict[int, Affine] = {}
    axis, out = -len(sizes), -len(shape_of(node))
    for item in items:
        if item is None:
            out += 1
        elif isinstance(item, slice):
            start = 0 if item.start is None else from_left(item.start, sizes[axis])
            step = 1 if item.step is None else size(item.step)
            places[axis] = affine(start) + index(out).times(step)
            axis, out = axis + 1, out + 1
        else:
            places[axis] = affine(from_left(item, sizes[axis]))
            axis += 1
    return at(of.value(x), places)


def from_left(place: Any, length: Size) -> Size:
    """A place in a dimension, that may be counted from its end."""
    place = size(place)
    if known(place < 0):
        place = place + length
    if not known(place >= 0):
        raise Unknown(f"the place {place} in a dimension of {length} may be counted from its end")
    return place


def _gathered(of: IndexFunctions, node: fx.Node, x: Any, items: tuple[Any, ...]) -> Value:
    """x[i, j, ...] with tensors of places for its first dimensions, each known to be in range."""
    sizes, shape = shape_of(x), shape_of(node)
    if any(not isinstance(traced(item), Tensor) for item in items):
        raise Unknown(f"{node.name} is indexed by tensors and by slices at once")
    rest = len(sizes) - len(items)
    places = {axis: index(axis) for axis in range(-rest, 0)}
    for axis, item in enumerate(items, start=-len(sizes)):
        if traced(item).dtype not in (torch.int64, torch.int32):
            raise Unknown(f"{node.name} selects by a mask")
        place = of.shaped(item, shape[: len(shape) - rest])
        if not isinstance(place, Affine):
            raise Unknown(f"{node.name} is indexed by places that are not known")
        place = at(place, {other: index(other - rest) for other in axes_of(place)})
        inside = both(at_least(place, affine(0)), at_least(affine(sizes[axis]), place + affine(1)))
        if everywhere(shape).decide(inside) is not True:
            raise Unknown(f"{node.name} is indexed by places that may be out of range")
        places[axis] = place
    return at(of.value(x), places)
