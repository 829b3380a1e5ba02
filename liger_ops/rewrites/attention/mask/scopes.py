"""Scopes: a graph and the checkpointed blocks that it calls, between which masks are passed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from torch import fx

from ....torch_private import HigherOrderOperator
from .evaluate import IndexFunctions


class Scope:
    """A graph and the functions of its nodes; for a checkpointed block also its caller.

    Attributes:
        graph: the graph.
        functions: the functions of its nodes.
        outer: the scope of the graph that calls this one, or None.
        call: the node of that graph that calls this one, or None.
    """

    def __init__(
        self, graph: fx.Graph, functions: IndexFunctions,
        outer: Scope | None = None, call: fx.Node | None = None,
    ) -> None:  # fmt: skip
        self.graph, self.functions, self.outer, self.call = graph, functions, outer, call

    @property
    def operands(self) -> dict[fx.Node, Any]:
        """The operand of each input of this graph and of the graphs around it."""
        outer = {} if self.outer is None else self.outer.operands
        return {**outer, **self.functions.operands}

    def home(self, node: fx.Node) -> tuple[Scope, fx.Node]:
        """Return the scope in which a value is computed, and its node there."""
        outer = self.functions.operands.get(node)
        return (self, node) if self.outer is None or outer is None else self.outer.home(outer)

    def inward(self, node: fx.Node) -> fx.Node:
        """Return the node of this scope that has the value of `node`, of this or an outer scope.

        A value of an outer scope becomes a further operand of the call, unless it is one already.
        """
        if self.outer is None or self.call is None or node.graph is self.graph:
            return node
        outer_node = self.outer.inward(node)
        for inner, operand in self.functions.operands.items():
            if operand is outer_node:
                return inner
        *_, last = (inner for inner in self.graph.nodes if inner.op == "placeholder")
        with self.graph.inserting_after(last):
            inner = self.graph.placeholder(f"liger_{outer_node.name}")
        inner.meta["example_value"] = outer_node.meta["example_value"]
        self.call.args = (*self.call.args, outer_node)
        self.functions.operands[inner] = outer_node
        return inner


def scopes(graph: fx.Graph, *, data: bool = False) -> Iterator[Scope]:
    """Yield the graph, and each checkpointed block that it calls once.

    A block that is called twice may have two masks, so no input of it has one function. For `data`
    see `IndexFunctions`.
    """
    yield from _inner(Scope(graph, IndexFunctions(data=data)))


def all_graphs(graph: fx.Graph) -> list[fx.Graph]:
    """Return the graph, and every graph that its module holds."""
    modules = graph.owning_module.modules() if graph.owning_module is not None else ()
    return [
        graph,
        *(submodule.graph for submodule in modules if isinstance(submodule, fx.GraphModule)),
    ]


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
    """Return the calls of checkpointed blocks, each with the block's module."""
    calls = []
    for node in graph.nodes:
        if isinstance(node.target, HigherOrderOperator) and (
            node.target.name() == "tag_activation_checkpoint"
        ):
            module: Any = getattr(graph.owning_module, str(node.args[0].target), None)
            if isinstance(module, fx.GraphModule):
                calls.append((node, module))
    return calls
