"""A graph and the checkpointed blocks that it calls, with the masks that cross between them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from torch import fx

from ....torch_private import HigherOrderOperator
from .evaluate import IndexFunctions


class Scope:
    """A graph, the functions of its nodes, and the scope and the call that it is called from."""

    def __init__(
        self, graph: fx.Graph, functions: IndexFunctions,
        outer: Scope | None = None, call: fx.Node | None = None,
    ) -> None:  # fmt: skip
        self.graph, self.functions, self.outer, self.call = graph, functions, outer, call

    @property
    def given(self) -> dict[fx.Node, Any]:
        """What each input of this graph and of those around it is given."""
        outer = {} if self.outer is None else self.outer.given
        return {**outer, **self.functions.operands}

    def home(self, node: fx.Node) -> tuple[Scope, fx.Node]:
        """The scope in which a value is computed, and its node there."""
        outer = self.functions.operands.get(node)
        return (self, node) if self.outer is None or outer is None else self.outer.home(outer)

    def inward(self, node: fx.Node) -> fx.Node:
        """The node of this scope that has the value of `node`, which is of this or an outer scope.

        A value of an outer scope becomes an operand of the call, unless it is one.
        """
        if self.outer is None or self.call is None or node.graph is self.graph:
            return node
        given = self.outer.inward(node)
        for inner, operand in self.functions.operands.items():
            if operand is given:
                return inner
        *_, last = (one for one in self.graph.nodes if one.op == "placeholder")
        with self.graph.inserting_after(last):
            inner = self.graph.placeholder(f"liger_{given.name}")
        inner.meta["example_value"] = given.meta["example_value"]
        self.call.args = (*self.call.args, given)
        self.functions.operands[inner] = given
        return inner


def scopes(graph: fx.Graph, *, data: bool = False) -> Iterator[Scope]:
    """The graph, and each subgraph that it calls once. For `data` see `IndexFunctions`."""
    yield from _inner(Scope(graph, IndexFunctions(data=data)))


def parts(graph: fx.Graph) -> list[fx.Graph]:
    """The graph, and every graph that its module holds."""
    modules = graph.owning_module.modules() if graph.owning_module is not None else ()
    return [graph, *(part.graph for part in modules if isinstance(part, fx.GraphModule))]


def _inner(scope: Scope) -> Iterator[Scope]:
    yield scope
    calls = _calls(scope.graph)
    called = Counter(module for _, module in calls)
    for node, module in calls:
        inputs = [inner for inner in module.graph.nodes if inner.op == "placeholder"]
        if called[module] > 1 or not inputs or len(inputs) != len(node.args) - 1:
            continue
        operands = dict(zip(inputs, node.args[1:], strict=True))
        nodes = {inner: outer for inner, outer in operands.items() if isinstance(outer, fx.Node)}
        yield from _inner(Scope(module.graph, IndexFunctions(scope.functions, nodes), scope, node))


def _calls(graph: fx.Graph) -> list[tuple[fx.Node, fx.GraphModule]]:
    """The calls of checkpointed blocks, each with the block's module."""
    calls = []
    for node in graph.nodes:
        if isinstance(node.target, HigherOrderOperator) and (
            node.target.name() == "tag_activation_checkpoint"
        ):
            module: Any = getattr(graph.owning_module, str(node.args[0].target), None)
            if isinstance(module, fx.GraphModule):
                calls.append((node, module))
    return calls
