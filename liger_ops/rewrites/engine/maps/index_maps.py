"""Views as maps of indices: for each element of a view, which element of its source it is.

`index_map(node)` reads the canonical call of a node, so a new spelling of a view is added in
`canonical/` alone. Axes are counted from the right. The place of an element along an axis of the
source is an affine function of the element's indices, or a quotient of one where a view merges
dimensions. A place holds for every symbolic size, or `Unknown` is raised.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from ..canonical import IDENTITY, Call, canonical, value
from .algebra import Affine, Size, Unknown, affine, always_true, index, quotient, substitute

# Canonical operations whose result has elements of their first argument: all, in the same shape;
COPIES = frozenset({IDENTITY, "contiguous"})
# all, in the same order and another shape;
RESHAPES = frozenset({"view", "squeeze", "unsqueeze"})
# at other places, not all of them, or some several times;
MOVES = frozenset(
    {"transpose", "permute", "expand", "repeat", "repeat_interleave", "slice", "getitem"}
)
VIEWS = COPIES | RESHAPES | MOVES
# or all, in another dtype, in other memory, or without a gradient.
CASTS = frozenset({"cast", "copy", "detach"})

# Axis of the source -> the place along it, a function of the indices of the view.
Places = Mapping[int, Affine]
Shape = Sequence[Size]


class IndexMap(NamedTuple):
    """The places of a view's elements in `source`; `nodes` lead there, the view's node first."""

    source: fx.Node
    places: Places
    nodes: tuple[fx.Node, ...]


def view_of(node: Any, ops: Collection[str] = VIEWS) -> Call | None:
    """Return the call of a view by one of `ops`, whose source comes first; None for other nodes."""
    call = canonical(node)
    if call is None or call.op not in ops:
        return None
    source = call.args[0]
    # x[None, None] is an unsqueeze of an unsqueeze.
    while isinstance(source, Call):
        source = source.args[0]
    return call._replace(args=(source, *call.args[1:]))


def index_map(node: Any, ops: Collection[str] = VIEWS) -> IndexMap | None:
    """Return the map of a view by one of `ops`, or None for any other node.

    Raises:
        Unknown: the places are not known, for the reason given.
    """
    if (call := view_of(node, ops)) is None:
        return None
    source, *args = call.args
    before, after = shape_of(source), shape_of(node)
    read = _reshaped if call.op in RESHAPES else _PLACES.get(call.op)
    places = {axis: index(axis) for axis in range(-len(before), 0)}
    if read is not None:
        places.update(read(before, after, *args))
    return IndexMap(source, places, (node, *call.through))


def index_maps(node: Any, ops: Collection[str] = VIEWS) -> Iterator[IndexMap]:
    """Yield the map of `node` to each tensor that it is a view of by `ops`, the nearest first.

    The last is behind a view whose places are not known.
    """
    places: Places | None = None
    nodes: tuple[fx.Node, ...] = ()
    while True:
        try:
            step = index_map(node, ops)
        except Unknown:
            return
        if step is None:
            return
        node, nodes = step.source, (*nodes, *step.nodes)
        places = step.places if places is None else _composed(step.places, places)
        yield IndexMap(node, places, nodes)


def _composed(inner: Places, outer: Places) -> Places:
    """Return the places of `inner` for indices that are themselves the places of `outer`."""
    # Most places are an index alone: `index` returns one object for each axis.
    indices = {id(index(axis)): place for axis, place in outer.items()}
    return {
        axis: indices[id(place)] if id(place) in indices else substitute(place, outer)
        for axis, place in inner.items()
    }


def shape_of(node: Any) -> Shape:
    example = value(node)
    if not isinstance(example, Tensor):
        raise Unknown(f"{node} is not a tensor")
    return example.shape


def size(argument: Any) -> Size:
    """Return an integer argument, concrete or symbolic."""
    example = value(argument)
    if isinstance(example, bool) or not isinstance(example, (int, torch.SymInt)):
        raise Unknown(f"{argument} is not an integer that is known at compile time")
    return example


def from_left(position: Any, length: Size) -> Size:
    """Return a position in a dimension, counted from the left also where it is negative."""
    position = size(position)
    if always_true(position < 0):
        position = position + length
    if not always_true(position >= 0):
        raise Unknown(f"the position {position} in a dimension of {length} may be negative")
    return position


def _axis(dim: Any) -> int:
    if not isinstance(dim, int) or isinstance(dim, bool) or dim >= 0:
        raise Unknown(f"the dimension {dim} is not known")
    return dim


def _transposed(before: Shape, after: Shape, dims: Any) -> Places:
    first, second = map(_axis, dims)
    return {first: index(second), second: index(first)}


def _permuted(before: Shape, after: Shape, dims: Any) -> Places:
    return {dim: index(new) for new, dim in enumerate(dims, start=-len(dims))}


def _repeated(before: Shape, after: Shape, *args: Any) -> Places:
    # An expanded dimension is one of size 1 that is repeated, in which every place is 0.
    return {
        axis: index(axis) - _quotient(index(axis), before[axis]).times(before[axis])
        for axis in range(-len(before), 0)
        if not always_true(before[axis] == after[axis])
    }


def _interleaved(before: Shape, after: Shape, count: Any, dim: Any) -> Places:
    axis = _axis(dim)
    return {axis: _quotient(index(axis), size(count))}


def _sliced(before: Shape, after: Shape, dim: Any, start: Any, stop: Any, step: Any) -> Places:
    axis = _axis(dim)
    return {axis: _from(slice(start, stop, step), before[axis], axis)}


def _indexed(before: Shape, after: Shape, items: Any) -> Places:
    places: dict[int, Affine] = {}
    old, new = -len(before), -len(after)
    for item in items:
        if isinstance(item, slice):
            places[old] = _from(item, before[old], new)
        elif item is not None:
            places[old] = affine(from_left(item, before[old]))
        old += item is not None
        new += item is None or isinstance(item, slice)
    return places


def _from(bounds: slice, length: Size, axis: int) -> Affine:
    """Return the place in a dimension of the index along `axis` of its slice."""
    start = 0 if bounds.start is None else from_left(bounds.start, length)
    return affine(start) + index(axis).times(1 if bounds.step is None else size(bounds.step))


def _reshaped(before: Shape, after: Shape, *args: Any) -> Places:
    """Return the places of the same elements in the same order, in another shape.

    Dimensions that both shapes begin or end with stay; those between are one group.
    """
    places = {axis: affine(0) for axis in range(-len(before), 0)}
    old, new = (
        [(axis, shape[axis]) for axis in range(-len(shape), 0) if not always_true(shape[axis] == 1)]
        for shape in (before, after)
    )
    for end in (-1, 0):
        while old and new and always_true(old[end][1] == new[end][1]):
            places[old.pop(end)[0]] = index(new.pop(end)[0])
    number = affine(0)
    for i, (axis, _) in enumerate(new):
        number = number + index(axis).times(_product(new[i + 1 :]))
    for i, (axis, length) in enumerate(old):
        stride = _product(old[i + 1 :])
        places[axis] = _quotient(number, stride)
        if i:
            places[axis] -= _quotient(number, stride * length).times(length)
    return places


def _product(dimensions: Sequence[tuple[int, Size]]) -> Any:
    return math.prod(length for _, length in dimensions)


def _quotient(number: Affine, divisor: Size) -> Affine:
    if isinstance(divisor, int) and divisor == 1:
        return number
    if not isinstance(divisor, int) or divisor < 1:
        raise Unknown(f"a dimension is divided by {divisor}, which is not a positive constant")
    return quotient(number, divisor)


# Canonical operation -> function of the shapes of the source and of the view, and of the other
# arguments of the call: the places that are not the element's own indices.
_PLACES: dict[str, Callable[..., Places]] = {
    "transpose": _transposed, "permute": _permuted, "expand": _repeated, "repeat": _repeated,
    "repeat_interleave": _interleaved, "slice": _sliced, "getitem": _indexed,
}  # fmt: skip
