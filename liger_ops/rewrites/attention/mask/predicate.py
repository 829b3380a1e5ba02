"""Write a condition as a graph: from (b, h, i, j) and the data that it reads to a boolean."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from ...engine.maps.algebra import (
    Affine,
    Condition,
    Datum,
    NonNegative,
    Not,
    Size,
    Unknown,
    data_of,
    same,
)

NAMES = {-4: "b", -3: "h", -2: "i", -1: "j"}


def integer(size: Size | float) -> int:
    """Return a constant of a condition as a Python integer.

    Raises:
        Unknown: it is a symbolic size, which a predicate cannot hold.
    """
    if not isinstance(size, int):
        raise Unknown("it depends on a size that is not fixed, beside the indices")
    return size


def read_tensors(condition: Condition) -> list[fx.Node]:
    """Return the nodes that a predicate reads, in a fixed order."""
    nodes = {datum.node for datum in data_of(condition)}
    return sorted(nodes, key=lambda node: node.name)


def predicate(condition: Condition) -> fx.GraphModule:
    """Return a condition as a graph of (b, h, i, j), 0-dimensional tensors, and `read_tensors`."""
    graph = fx.Graph()
    indices = {axis: graph.placeholder(name) for axis, name in NAMES.items()}
    tensors = {
        node: graph.placeholder(f"data_{position}")
        for position, node in enumerate(read_tensors(condition))
    }
    graph.output(PredicateWriter(graph, indices, tensors).condition(condition))
    return fx.GraphModule(torch.nn.Module(), graph)


def inlined(call: Callable[..., Any], graph: fx.Graph, *inputs: Any) -> Any:
    """Run a graph on `inputs` by `call`, which calls a function or inserts its call elsewhere."""
    values: dict[fx.Node, Any] = dict(zip(graph.find_nodes(op="placeholder"), inputs, strict=True))
    for node in graph.nodes:
        target: Any = node.target
        if node.op == "call_method":
            target = getattr(torch.Tensor, target)
        if node.op.startswith("call"):
            args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = call(target, *args, **kwargs)
    return values[node.args[0]]


class PredicateWriter:
    """Writes the operations of a condition into a graph.

    `indices` maps axes, and `tensors` nodes of the traced graph, to the placeholders of the
    predicate. An element that is read several times is read once.
    """

    def __init__(
        self, graph: fx.Graph, indices: dict[int, fx.Node], tensors: dict[fx.Node, fx.Node]
    ) -> None:
        self.call: Callable[..., Any] = lambda target, *args: graph.call_function(target, args)
        self.indices, self.tensors = indices, tensors
        self._data: dict[Datum, Any] = {}

    def condition(self, condition: Condition) -> Any:
        """Return the node of a condition."""
        call = self.call
        if isinstance(condition, bool):
            # A tensor of the indices' device: no index is negative.
            i = self.indices[-2]
            return call(operator.ge if condition else operator.lt, i, 0)
        if isinstance(condition, NonNegative):
            return self._compare(operator.ge, condition.value)
        if isinstance(condition, Not):
            return call(torch.logical_not, self.condition(condition.operand))
        sides = condition.left, condition.right
        # x >= 0 and -x >= 0 is how `algebra.equal` says x == 0.
        values = [side.value for side in sides if isinstance(side, NonNegative)]
        if len(values) == 2 and same(values[0], values[1].times(-1)):
            return self._compare(operator.eq, values[0])
        return call(operator.and_, *map(self.condition, sides))

    def _compare(self, comparison: Any, value: Affine) -> Any:
        """Return the comparison of `value` with 0, as of its positive with its negative summands.

        Neither side can overflow where the code that the graph was traced from does not.
        """
        left: list[Any] = []
        right: list[Any] = []
        for axis, slope in value.slopes.items():
            (left if slope > 0 else right).append(self._scaled(self.indices[axis], abs(slope)))
        for term, slope in value.terms.items():
            (left if slope > 0 else right).append(self._scaled(self._term(term), abs(slope)))
        constant = integer(value.constant)
        if constant:
            (left if constant > 0 else right).append(abs(constant))
        return self.call(comparison, self._sum(left), self._sum(right))

    def _term(self, term: Any) -> Any:
        if isinstance(term, Datum):
            if term not in self._data:
                self._data[term] = self._read(term)
            return self._data[term]
        return self.call(operator.floordiv, self._number(term.dividend), term.divisor)

    def _read(self, datum: Datum) -> Any:
        indices = tuple(self._number(position) for position in datum.indices)
        tensor = self.tensors[datum.node]
        element = self.call(operator.getitem, tensor, indices) if indices else tensor
        # Booleans do not add.
        return self.call(torch.Tensor.to, element, torch.int64)

    def _number(self, value: Affine) -> Any:
        """Return a number as a tensor, also where it is constant: an index has to be a tensor."""
        if value.is_constant:
            zero = self.call(operator.mul, self.indices[-4], 0)
            return self.call(operator.add, zero, integer(value.constant))
        summands = [self._scaled(self.indices[axis], slope) for axis, slope in value.slopes.items()]
        summands += [self._scaled(self._term(term), slope) for term, slope in value.terms.items()]
        constant = integer(value.constant)
        return self._sum([*summands, constant] if constant else summands)

    def _scaled(self, number: Any, factor: int) -> Any:
        return number if factor == 1 else self.call(operator.mul, number, factor)

    def _sum(self, summands: Sequence[Any]) -> Any:
        total = summands[0] if summands else 0
        for summand in summands[1:]:
            total = self.call(operator.add, total, summand)
        return total
