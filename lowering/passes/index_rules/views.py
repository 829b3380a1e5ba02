"""What moves or repeats elements, and casts."""

from __future__ import annotations

from typing import Any

from torch import fx

from ..canonical import value as traced
from ..index_algebra import Unknown, Value, at, index, known
from ..index_function import IndexFunctions, axis_of, rule, shape_of


@rule("view", "reshape", "unsqueeze", "squeeze", "flatten", "unflatten")
def _same_elements(of: IndexFunctions, node: fx.Node, x: Any, *args: Any, **kwargs: Any) -> Value:
    """Dimensions of size 1 come and go; merging or splitting others is unknown."""
    if traced(x).dtype != traced(node).dtype:
        raise Unknown(f"{node.name} reads the bytes of one dtype as another")
    before, after = (
        [axis for axis in range(-len(shape), 0) if not known(shape[axis] == 1)]
        for shape in (shape_of(x), shape_of(node))
    )
    if len(before) != len(after) or not all(
        known(shape_of(x)[old] == shape_of(node)[new])
        for old, new in zip(before, after, strict=True)
    ):
        raise Unknown(f"{node.name} merges or splits dimensions")
    return at(of.value(x), {old: index(new) for old, new in zip(before, after, strict=True)})


@rule("expand", "expand_as", "broadcast_to", "repeat", "tile")
def _expanded(of: IndexFunctions, node: fx.Node, x: Any, *args: Any, **kwargs: Any) -> Value:
    return of.shaped(x, shape_of(node))


@rule("transpose", "swapaxes", "swapdims")
def _transpose(of: IndexFunctions, node: fx.Node, x: Any, dim0: Any, dim1: Any) -> Value:
    first, second = axis_of(node, dim0), axis_of(node, dim1)
    return at(of.value(x), {first: index(second), second: index(first)})


@rule("t")
def _t(of: IndexFunctions, node: fx.Node, x: Any) -> Value:
    return at(of.value(x), {-1: index(-2), -2: index(-1)}) if traced(x).dim() == 2 else of.value(x)


@rule("getattr")
def _getattr(of: IndexFunctions, node: fx.Node, x: Any, name: str) -> Value:
    if name == "mT" or (name == "T" and traced(x).dim() == 2):
        return _transpose(of, node, x, -1, -2)
    raise Unknown(f"it reads the attribute {name}")


@rule("permute")
def _permute(of: IndexFunctions, node: fx.Node, x: Any, *dims: Any) -> Value:
    dims = tuple(dims[0]) if len(dims) == 1 and isinstance(dims[0], (tuple, list)) else dims
    return at(
        of.value(x),
        {axis_of(node, dim): index(place - len(dims)) for place, dim in enumerate(dims)},
    )


@rule("contiguous", "clone", "detach", "to", "type", "type_as", "bool", "int", "long", "float")
@rule("half", "double", "bfloat16", "cuda", "cpu")
def _cast(of: IndexFunctions, node: fx.Node, x: Any, *args: Any, **kwargs: Any) -> Value:
    return of.value(x)
