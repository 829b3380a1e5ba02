"""Evaluate the nodes of a graph as functions of their indices: masks, and their operands.

`IndexFunctions().value(node)` returns that function. It raises `Unknown`, with the reason, for an
input of the graph, for an operation without a rule, and where arithmetic in the node's dtype could
differ from integer arithmetic. With `data`, an integer or boolean tensor that cannot be evaluated
is instead read: its elements are `Datum`s of the function.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from ...engine.canonical import arguments, is_tensor, operation
from ...engine.canonical import value as traced
from ...engine.casts import represents
from ...engine.graph_state import needed_by
from ...engine.memory import is_plain
from ..numbers import rounded
from .algebra import (
    Affine,
    Datum,
    Size,
    Unknown,
    Value,
    affine,
    at,
    at_least,
    axes_of,
    index,
    known,
    lift,
    number,
    same,
    truth,
)
from .region import everywhere
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
        if node not in self._values:
            self._depth += 1
            try:
                self._values[node] = self._found(node)
            except Unknown as unknown:
                self._values[node] = self._read(node) or Unknown(*unknown.args)
            finally:
                self._depth -= 1
        value = self._values[node]
        if isinstance(value, Unknown):
            raise Unknown(*value.args)
        return value

    def _read(self, node: fx.Node) -> Value | None:
        """The elements of `node` as data, or None if it is not a plain tensor of integers."""
        example = traced(node)
        if not self.data or not is_tensor(node) or not is_plain(example):
            return None
        if not represents(torch.int64, example.dtype):
            return None
        places = tuple(
            affine(0) if known(size == 1) else index(axis)
            for axis, size in enumerate(example.shape, start=-example.dim())
        )
        element = affine(0, {}, {Datum(node, places): 1})
        return at_least(element, affine(1)) if example.dtype == torch.bool else element

    def read(self, node: fx.Node) -> Iterator[fx.Node]:
        """`node`, and every node that its value was computed from."""
        for part in needed_by(node, end=lambda one: one not in self._values) & self._values.keys():
            yield part
            if part in self.operands and self.outer is not None:
                yield from self.outer.read(self.operands[part])

    def shaped(self, argument: Any, shape: Sequence[Size]) -> Value:
        """An operand as a function of the indices of `shape`, to which it is broadcast."""
        example = traced(argument)
        if isinstance(example, Tensor):
            return broadcast(self.value(argument), example.shape, shape)
        if isinstance(example, bool):
            return example
        if isinstance(example, (int, float, torch.SymInt)):
            return affine(example)
        raise Unknown(f"{argument} is not a number that is known at compile time")

    def _found(self, node: fx.Node) -> Value:
        if self._depth > DEPTH:
            raise Unknown(f"it depends on more than {DEPTH} operations")
        if node.op == "placeholder" and self.outer is not None and node in self.operands:
            return self.outer.value(self.operands[node])
        if node.op in ("placeholder", "get_attr"):
            raise Unknown(f"it depends on the values of {node.name}, an input of the graph")
        example = traced(node)
        if not isinstance(example, Tensor) or example.layout is not torch.strided:
            raise Unknown(f"{node.name} is not a dense tensor")
        rule = RULES.get(operation(node))
        if rule is None:
            raise Unknown(f"it depends on {node.name}, which is not computed from indices alone")
        try:
            value = rule(self, node, *arguments(node), **node.kwargs)
        except TypeError:
            raise Unknown(f"{node.name} has arguments that its rule does not take") from None
        return settled(value, example)


def broadcast(value: Value, shape: Sequence[Size], to: Sequence[Size]) -> Value:
    """`value`, if every axis that it depends on has the same size in both shapes."""
    for axis in axes_of(value):
        if -axis > len(to) or not known(shape[axis] == to[axis]):
            raise Unknown(f"the sizes {tuple(shape)} and {tuple(to)} may differ")
    return value


def settled(value: Value, example: Tensor) -> Value:
    """The value in the tensor's dtype, without the indices of dimensions of size 1."""
    alone = {
        axis: affine(0)
        for axis in axes_of(value)
        if -axis <= example.dim() and known(example.shape[axis] == 1)
    }
    value = at(value, alone) if alone else value
    dtype = example.dtype
    if dtype == torch.bool:
        return truth(value)
    numbers = lift(lambda leaf: held(leaf, dtype), number(value))
    return everywhere(example.shape).simplified(numbers)


def held(leaf: Affine, dtype: torch.dtype) -> Affine:
    """The number in `dtype`; raises Unknown where rounding or overflow might change it.

    The floats that are accepted are 0, 1, -1, infinities, and those so large that only their sign
    matters, in dtypes that have all of these, as the narrowest float with infinities does.
    """
    constant, slopes = leaf.constant, leaf.slopes
    if dtype.is_floating_point:
        is_number = isinstance(constant, (int, float)) and leaf.is_constant
        if is_number and represents(dtype, torch.float8_e5m2):
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
        bits = torch.iinfo(dtype).bits
        small = isinstance(constant, torch.SymInt) or abs(constant) < 2 ** (bits - 2)
        if small and sum(map(abs, slopes.values())) <= (2 if bits == 32 else 2**20):
            return leaf
    elif leaf.is_constant and not isinstance(constant, torch.SymInt) and constant in (0, 1):
        return leaf
    raise Unknown(f"it holds numbers that {dtype} may round or overflow")


def _is_element(leaf: Affine, dtype: torch.dtype) -> bool:
    """Whether the number is an element of a tensor of `dtype`, unchanged."""
    return any(
        isinstance(term, Datum)
        and traced(term.node).dtype == dtype
        and same(leaf, affine(0, {}, {term: 1}))
        for term in leaf.terms
    )
