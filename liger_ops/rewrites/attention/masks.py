"""The masks of attention, and the condition that a query sees a key past all of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from ..engine.canonical import value
from ..engine.graph_state import GraphState
from ..engine.insertion import Refused
from ..engine.maps.algebra import (
    Condition,
    Unknown,
    always_true,
    axes_of,
    conjunction,
    negation,
    truth,
)
from .attention_products import Operand
from .mask.evaluate import IndexFunctions
from .mask.proof import visible_keys
from .mask.scopes import Scope

States = Mapping[fx.Graph, GraphState]


@dataclass(frozen=True)
class Mask:
    """A tensor that is added to the scores, or a boolean tensor that fills some of them.

    Attributes:
        tensor: its shape broadcasts to (B, H, S, T).
        visible: the truth of a boolean mask where the score stays; None for a tensor that is added,
            and for the mask of a call, which may be either.
        fill: the number that a boolean mask writes where it hides a score.
    """

    tensor: Operand
    visible: bool | None = None
    fill: float | None = None

    @property
    def source(self) -> fx.Node:
        return self.tensor.source


def visible_past(
    masks: Iterable[Mask], scope: Scope, states: States, shape: Sequence[Any]
) -> Condition:
    """Return the condition that a query sees a key past all masks, a function of (b, h, i, j).

    `shape` is the shape of the scores.

    Raises:
        Refused: the condition of a mask is unknown, or it may not fit the scores; there may be no
            keys; or a tensor that a condition was read from is written in place.
    """
    if not always_true(shape[-1] >= 1):
        raise Refused("it may have no keys")
    condition: Condition = True
    for mask in masks:
        try:
            condition = conjunction(condition, _condition_of(mask, scope.functions, shape))
        except Unknown as unknown:
            raise Refused(f"its mask cannot be analysed: {unknown}") from None
        if is_written(scope.functions.nodes_read(mask.source), states):
            raise Refused("its mask, or a tensor that it is computed from, is written in place")
    return condition


def is_written(nodes: Iterable[fx.Node], states: States) -> bool:
    """Return whether one of the tensors is written in place in any of the graphs."""
    nodes = set(nodes)
    return any(state.ever_written(nodes) for state in states.values())


def _condition_of(mask: Mask, functions: IndexFunctions, shape: Sequence[Any]) -> Condition:
    """Return the condition under which a mask lets a query see a key of scores of `shape`."""
    sizes = value(mask.source).shape
    # A view for scores of three dimensions, (B * H, S, T), keeps the queries and keys alone.
    same_axes = min(len(sizes), 2) if mask.tensor.views else len(sizes)
    for axis in range(-same_axes, 0):
        if not (always_true(sizes[axis] == 1) or always_true(sizes[axis] == shape[axis])):
            raise Unknown("its mask may not fit its scores")
    if min(axes_of(functions.value(mask.source)), default=0) < -same_axes:
        raise Unknown("its mask differs between the rows of a batch")
    return visible(mask, functions)


def visible(mask: Mask, functions: IndexFunctions) -> Condition:
    """Return the condition that a mask lets a query see a key, in the mask's own indices."""
    function = functions.value(mask.source)
    if mask.visible is None:
        return visible_keys(function)
    return truth(function) if mask.visible else negation(truth(function))
