"""The queries that see no key, and attention that is the mean of the values there.

Code that adds a finite number c to hidden scores gives such a query the same weight for every key:
c is so low that every score + c rounds to c. The gradient of a sum does not see the rounding, so
the scores get their share of it. flex_attention computes that if the query sees all keys, and if
its scores are rounded in the same way, to 0 instead of c: the logarithm of a sum of exponentials of
c would lose the number of keys.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from ...engine.emitter import Emitter
from .algebra import Condition, Datum, affine, at_least, axes_of, index, known
from .predicate import predicate, read_tensors

# Scores are far below its rounding error, in float64 too.
LARGE = 1e30
_AXES = (-4, -3, -2, -1)


def unseen_queries(
    emit: Emitter, condition: Condition, sizes: Mapping[int, Any],
    tensors: Mapping[fx.Node, fx.Node], device: torch.device,
) -> fx.Node:  # fmt: skip
    """Emit a boolean tensor (B, H, S): whether a query sees no key. An axis that the condition does
    not depend on has size 1.

    The condition is evaluated at every query and key, which Inductor does inside of the reduction
    over the keys.
    """
    used = axes_of(condition)
    indices = []
    for axis in _AXES:
        positions = emit(torch.arange, sizes[axis] if axis in used else 1, device=device)
        items: list[Any] = [None] * len(_AXES)
        items[axis] = slice(None)
        indices.append(emit(operator.getitem, positions, tuple(items)))
    data = [tensors[tensor] for tensor in read_tensors(condition)]
    seen = _evaluated(emit, predicate(condition), [*indices, *data])
    new: fx.Node = emit(torch.logical_not, emit(torch.any, seen, -1))
    return new


def _evaluated(emit: Emitter, module: fx.GraphModule, inputs: list[Any]) -> Any:
    """Emit the operations of a graph."""
    values: dict[fx.Node, Any] = {}
    given = iter(inputs)
    for node in module.graph.nodes:
        if node.op == "placeholder":
            values[node] = next(given)
        elif node.op == "output":
            return values[node.args[0]]
        else:
            arguments = fx.node.map_arg(node.args, values.__getitem__)
            values[node] = emit(node.target, *arguments)
    raise AssertionError("a graph has an output")


def is_unseen(unseen: fx.Node) -> Condition:
    """The condition that a query is one of them."""
    shape = unseen.meta["example_value"].shape
    places = tuple(
        affine(0) if known(size == 1) else index(axis)
        for axis, size in zip(_AXES[:-1], shape, strict=True)
    )
    return at_least(affine(0, {}, {Datum(unseen, places): 1}), affine(1))


def rounded(score: Any, unseen: Any) -> Any:
    """The score, rounded to 0 where `unseen` is true, with the gradient of the score."""
    large = unseen * LARGE
    return (score + large) - large


def read_at(unseen: Any, indices: tuple[Any, ...], like: torch.Tensor) -> Any:
    """The element of `unseen`, which has the shape of `like`, for the indices b, h and i."""
    places = zip(indices, like.shape, strict=True)
    return unseen[tuple(place * 0 if known(size == 1) else place for place, size in places)]
