"""The predicate of a mask as a graph: from (b, h, i, j) and the data it reads to a boolean."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from .algebra import Affine, Condition, Datum, NonNegative, Not, Size, Unknown, data_of, same

NAMES = {-4: "b", -3: "h", -2: "i", -1: "j"}


def integer(size: Size | float) -> int:
    """The constant as a Python integer.

    Raises:
        Unknown: it is a symbolic size, which a predicate cannot hold.
    """
    if not isinstance(size, int):
        raise Unknown("it depends on a size that is not fixed, beside the indices")
    return size


def read_tensors(condition: Condition) -> list[fx.Node]:
    """The nodes that a predicate reads, in a fixed order."""
    nodes = {datum.node for datum in data_of(condition)}
    return sorted(nodes, key=lambda node: node.name)


def predicate(condition: Condition) -> fx.GraphModule:
    """The condition at (b, h, i, j), 0-dimensional tensors; then come the `read_tensors`."""
    graph = fx.Graph()
    indices = {axis: graph.placeholder(name) for axis, name in NAMES.items()}
    tensors = {
        node: graph.placeholder(f"data_{place}")
        for place, node in enumerate(read_tensors(condition))
    }
    graph.output(_Writer(graph, indices, tensors).condition(condition))
    return fx.GraphModule(torch.nn.Module(), graph)


def inlined(call: Callable[..., Any], graph: fx.Graph, *inputs: Any) -> Any:
    """Call or insert the operations of a graph."""
    values: dict[fx.Node, Any] = dict(zip(graph.find_nodes(op="placeholder"), inputs, strict=True))
    for node in graph.nodes:
        target: Any = node.target
        if node.op == "call_method":
            target = getattr(torch.Tensor, target)
        if node.op.startswith("call"):
            args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = call(target, *args, **kwargs)
    return values[node.args[0]]


class _Writer:
    def __init__(
        self, graph: fx.Graph, indices: dict[int, fx.Node], tensors: dict[fx.Node, fx.Node]
    ) -> None:
        self.call: Callable[..., Any] = lambda target, *args: graph.call_function(target, args)
        self.indices, self.tensors = indices, tensors
        self._data: dict[Datum, Any] = {}

    def condition(self, condition: Condition) -> Any:
        call = self.call
        if isinstance(condition, bool):
            i = self.indices[-2]
            return call(operator.ge if condition else operator.lt, i, 0)
        if isinstance(condition, NonNegative):
            return self._compare(operator.ge, condition.value)
        if isinstance(condition, Not):
            return call(torch.logical_not, self.condition(condition.of))
        sides = condition.left, condition.right
        values = [side.value for side in sides if isinstance(side, NonNegative)]
        if len(values) == 2 and same(values[0], values[1].times(-1)):
            return self._compare(operator.eq, values[0])
        return call(operator.and_, *map(self.condition, sides))

    def _compare(self, comparison: Any, value: Affine) -> Any:
        """Compare the positive part of a sum with the negative part: neither can overflow where the
        code that the graph was traced from does not."""
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
        places = tuple(self._number(place) for place in datum.places)
        tensor = self.tensors[datum.node]
        element = self.call(operator.getitem, tensor, places) if places else tensor
        # Booleans do not add.
        return self.call(torch.Tensor.to, element, torch.int64)

    def _number(self, value: Affine) -> Any:
        """The number as a tensor, also where it is constant: an index has to be a tensor."""
        if value.is_constant:
            zero = self.call(operator.mul, self.indices[-4], 0)
            return self.call(operator.add, zero, integer(value.constant))
        parts = [self._scaled(self.indices[axis], slope) for axis, slope in value.slopes.items()]
        parts += [self._scaled(self._term(term), slope) for term, slope in value.terms.items()]
        constant = integer(value.constant)
        return self._sum([*parts, constant] if constant else parts)

    def _scaled(self, number: Any, factor: int) -> Any:
        return number if factor == 1 else self.call(operator.mul, number, factor)

    def _sum(self, parts: Sequence[Any]) -> Any:
        total = parts[0] if parts else 0
        for part in parts[1:]:
            total = self.call(operator.add, total, part)
        return total
