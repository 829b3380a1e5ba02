"""Evaluate the nodes of a graph, masks and their operands, as functions of their indices.

`IndexFunctions().value(node)` returns that function. It raises `Unknown`, with the reason, for an
input of the graph, for an operation without a rule, and where arithmetic in the node's dtype could
differ from integer arithmetic. With `data`, an integer or boolean tensor that cannot be evaluated
is data instead: its elements are `Datum`s of the function.

A scope is a graph, or a checkpointed block that it calls, to which masks are passed.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from ....torch_private import HigherOrderOperator
from ...engine.canonical import arguments, is_tensor, operation
from ...engine.canonical import value as traced
from ...engine.casts import represents
from ...engine.effects import is_plain
from ...engine.graph_state import needed_by
from ...engine.maps.algebra import (
    Affine,
    Datum,
    Size,
    Unknown,
    Value,
    affine,
    always_true,
    at_least,
    axes_of,
    index,
    lift,
    number,
    same,
    substitute,
    truth,
)
from ...engine.maps.index_maps import CASTS, VIEWS, IndexMap, index_map
from ..numbers import rounded
from .proof import everywhere
from .rules import RULES

# The masks of transformers are about 12 nodes deep. The limit keeps the recursion from following a
# model's residual stream, which is deeper than Python's stack.
DEPTH = 60


class IndexFunctions:
    """The functions of one graph's nodes, each evaluated once.

    For a subgraph, `outer` holds the functions of the graph that calls it, and `operands` maps the
    subgraph's placeholders to the operands of the call.
    """

    def __init__(
        self, outer: IndexFunctions | None = None,
        operands: Mapping[fx.Node, Any] | None = None, *, data: bool = False,
    ) -> None:  # fmt: skip
        self.outer = outer
        self.operands: dict[fx.Node, Any] = dict(operands or {})
        self.data: bool = outer.data if outer is not None else data
        self._values: dict[fx.Node, Value | Unknown] = {}
        self._depth = 0

    def value(self, node: fx.Node) -> Value:
        """Return the function of a node.

        Raises:
            Unknown: the node has none, for the reason given.
        """
        if node not in self._values:
            self._depth += 1
            try:
                self._values[node] = self._evaluate(node)
            except Unknown as unknown:
                self._values[node] = self._as_data(node) or Unknown(*unknown.args)
            finally:
                self._depth -= 1
        value = self._values[node]
        if isinstance(value, Unknown):
            raise Unknown(*value.args)
        return value

    def _as_data(self, node: fx.Node) -> Value | None:
        """Return the elements of `node` as data; None if it is no plain tensor of integers."""
        example = traced(node)
        if not self.data or not is_tensor(node) or not is_plain(example):
            return None
        if not represents(torch.int64, example.dtype):
            return None
        indices = tuple(
            affine(0) if always_true(size == 1) else index(axis)
            for axis, size in enumerate(example.shape, start=-example.dim())
        )
        element = affine(0, {}, {Datum(node, indices): 1})
        return at_least(element, affine(1)) if example.dtype == torch.bool else element

    def nodes_read(self, node: fx.Node) -> Iterator[fx.Node]:
        """Yield `node` and every node that its value was computed from.

        The value is only valid while none of these is written in place.
        """
        for source in (
            needed_by(node, end=lambda candidate: candidate not in self._values)
            & self._values.keys()
        ):
            yield source
            if source in self.operands and self.outer is not None:
                yield from self.outer.nodes_read(self.operands[source])

    def shaped(self, argument: Any, shape: Sequence[Size]) -> Value:
        """Return an operand as a function of the indices of `shape`, to which it is broadcast."""
        example = traced(argument)
        if isinstance(example, Tensor):
            return broadcast(self.value(argument), example.shape, shape)
        if isinstance(example, bool):
            return example
        if isinstance(example, (int, float, torch.SymInt)):
            return affine(example)
        raise Unknown(f"{argument} is not a number that is known at compile time")

    def _evaluate(self, node: fx.Node) -> Value:
        if self._depth > DEPTH:
            raise Unknown(f"it depends on more than {DEPTH} operations")
        if node.op == "placeholder" and self.outer is not None and node in self.operands:
            return self.outer.value(self.operands[node])
        if node.op in ("placeholder", "get_attr"):
            raise Unknown(f"it depends on the values of {node.name}, an input of the graph")
        example = traced(node)
        if not isinstance(example, Tensor) or example.layout is not torch.strided:
            raise Unknown(f"{node.name} is not a dense tensor")
        if (view := index_map(node, VIEWS | CASTS)) is not None:
            return normalised(self._of_view(view), example)
        rule = RULES.get(operation(node))
        if rule is None:
            raise Unknown(f"it depends on {node.name}, which is not computed from indices alone")
        # A rule takes the tensor first, whatever it calls it.
        named = dict(node.kwargs)
        first = (named.pop("input"),) if "input" in named else ()
        try:
            value = rule(self, node, *first, *arguments(node), **named)
        except TypeError:
            raise Unknown(f"{node.name} has arguments that its rule does not take") from None
        return normalised(value, example)

    def _of_view(self, view: IndexMap) -> Value:
        if any(place.terms or len(place.slopes) > 1 for place in view.places.values()):
            raise Unknown(f"{view.nodes[0].name} repeats, merges or splits dimensions")
        # `nodes_read` goes through every node that has a value or none.
        for passed in view.nodes[1:]:
            with contextlib.suppress(Unknown):
                self.value(passed)
        return substitute(self.value(view.source), view.places)


def broadcast(value: Value, shape: Sequence[Size], to: Sequence[Size]) -> Value:
    """Return `value`, a function of the indices of `shape`, as a function of the indices of `to`.

    Axes are counted from the right, and an axis of size 1 is not in `value` (`normalised`), so the
    function is the same.

    Raises:
        Unknown: an axis that it depends on is not proved to have the same size in both shapes.
    """
    for axis in axes_of(value):
        if -axis > len(to) or not always_true(shape[axis] == to[axis]):
            raise Unknown(f"the sizes {tuple(shape)} and {tuple(to)} may differ")
    return value


def normalised(value: Value, example: Tensor) -> Value:
    """Return the value in the tensor's dtype, with 0 for the indices of dimensions of size 1."""
    singletons = {
        axis: affine(0)
        for axis in axes_of(value)
        if -axis <= example.dim() and always_true(example.shape[axis] == 1)
    }
    value = substitute(value, singletons) if singletons else value
    dtype = example.dtype
    if dtype == torch.bool:
        return truth(value)
    numbers = lift(lambda leaf: checked(leaf, dtype), number(value))
    return everywhere(example.shape).simplified(numbers)


def checked(leaf: Affine, dtype: torch.dtype) -> Affine:
    """Return a number as `dtype` stores it.

    The floats that are accepted are 0, 1, -1, infinities, and those so large that only their sign
    matters, in dtypes that have all of these, as float8_e5m2 does, the narrowest with infinities.

    Raises:
        Unknown: rounding or overflow might change the number.
    """
    constant, slopes = leaf.constant, leaf.slopes
    if dtype.is_floating_point:
        is_finite_constant = isinstance(constant, (int, float)) and leaf.is_constant
        if is_finite_constant and represents(dtype, torch.float8_e5m2):
            constant = rounded(float(constant), dtype)
            if constant in (0.0, 1.0, -1.0) or abs(constant) >= 1e30:
                return affine(constant)
    elif isinstance(constant, float):
        if constant in (0.0, 1.0):
            return affine(int(constant))
    elif leaf.terms:
        if dtype == torch.int64 or _is_element(leaf, dtype):
            return leaf
    elif dtype in (torch.int64, torch.int32):
        # Sizes and indices are taken to be below 2**29 as int32 and 2**42 as int64: the products
        # with these slopes, and the constant, do not overflow then.
        bits = torch.iinfo(dtype).bits
        small = isinstance(constant, torch.SymInt) or abs(constant) < 2 ** (bits - 2)
        if small and sum(map(abs, slopes.values())) <= (2 if bits == 32 else 2**20):
            return leaf
    elif leaf.is_constant and not isinstance(constant, torch.SymInt) and constant in (0, 1):
        return leaf
    raise Unknown(f"it holds numbers that {dtype} may round or overflow")


def _is_element(leaf: Affine, dtype: torch.dtype) -> bool:
    """Return whether the number is an element of a tensor of `dtype`, unchanged."""
    return any(
        isinstance(term, Datum)
        and traced(term.node).dtype == dtype
        and same(leaf, affine(0, {}, {term: 1}))
        for term in leaf.terms
    )


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
