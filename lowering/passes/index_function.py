"""The nodes of a graph that are known functions of their indices: masks, and what they are made of.

`IndexFunctions().value(node)` is such a function; `Unknown` is raised, with its reason, where
there is none: at inputs of the graph, at operations of which there is no rule, and where arithmetic
in the dtype could differ from that of whole numbers.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from .canonical import value as traced
from .index_algebra import (
    Affine,
    Size,
    Unknown,
    Value,
    affine,
    at,
    axes_of,
    everywhere,
    known,
    lift,
    number,
    truth,
)

# A mask of transformers is some 12 nodes deep; a model's residual stream is deeper than Python's
# stack.
DEPTH = 60

Rule = Callable[..., Value]
RULES: dict[Any, Rule] = {}
OPERATORS = {
    operator.and_: "and",
    operator.or_: "or",
    operator.xor: "xor",
    operator.invert: "not",
    operator.getitem: "getitem",
    getattr: "getattr",
}


class IndexFunctions:
    """The functions of one graph.

    A subgraph's placeholders are what `outer`, the functions of the graph that calls it, knows of
    the call's operands.
    """

    def __init__(
        self,
        outer: IndexFunctions | None = None,
        operands: Mapping[fx.Node, Any] | None = None,
    ) -> None:
        self.outer = outer
        self.operands = operands or {}
        self._values: dict[fx.Node, Value | Unknown] = {}
        self._depth = 0

    def value(self, node: fx.Node) -> Value:
        if node not in self._values:
            self._depth += 1
            try:
                self._values[node] = self._found(node)
            except Unknown as unknown:
                self._values[node] = Unknown(*unknown.args)
            finally:
                self._depth -= 1
        value = self._values[node]
        if isinstance(value, Unknown):
            raise Unknown(*value.args)
        return value

    def read(self, node: fx.Node) -> Iterator[fx.Node]:
        """The nodes whose values make that of `node`, itself first."""
        found: set[fx.Node] = set()
        waiting = [node]
        while waiting:
            part = waiting.pop()
            if part in found or part not in self._values:
                continue
            found.add(part)
            yield part
            waiting += part.all_input_nodes
            if part in self.operands and self.outer is not None:
                yield from self.outer.read(self.operands[part])

    def shaped(self, argument: Any, shape: Sequence[Size]) -> Value:
        """An operand as a function of the indices of a tensor that it is broadcast to."""
        example = traced(argument)
        if isinstance(example, Tensor):
            return broadcast(self.value(argument), example.shape, shape)
        if isinstance(example, bool):
            return example
        if isinstance(example, (int, float, torch.SymInt)):
            return affine(example)
        raise Unknown(f"{argument} is not a number that is known while the graph is compiled")

    def _found(self, node: fx.Node) -> Value:
        if self._depth > DEPTH:
            raise Unknown(f"it hangs on more than {DEPTH} operations")
        if node.op == "placeholder" and self.outer is not None and node in self.operands:
            return self.outer.value(self.operands[node])
        if node.op in ("placeholder", "get_attr"):
            raise Unknown(f"it depends on the values of {node.name}, which the graph is given")
        example = traced(node)
        if not isinstance(example, Tensor) or example.layout is not torch.strided:
            raise Unknown(f"{node.name} is not a dense tensor")
        rule = RULES.get(operation(node))
        if rule is None:
            raise Unknown(f"it depends on {node.name}, which is not made from its indices alone")
        try:
            value = rule(self, node, *node.args, **node.kwargs)
        except TypeError:
            raise Unknown(f"{node.name} has arguments that are not known here") from None
        return settled(value, example)


def operation(node: fx.Node) -> str | None:
    """The name of what a node does; of a function only where it is PyTorch's own."""
    if node.op == "call_method":
        name = str(node.target)
        name = name[2:-2] if name.startswith("__") and name.endswith("__") else name
        return "not" if name == "invert" else name
    if node.op != "call_function":
        return None
    if node.target in OPERATORS:
        return OPERATORS[node.target]
    name = getattr(node.target, "__name__", "")
    owners = (operator, torch, torch.nn.functional)
    return name if any(getattr(owner, name, None) is node.target for owner in owners) else None


def broadcast(value: Value, shape: Sequence[Size], to: Sequence[Size]) -> Value:
    """The same function, where it is one: the indices that matter have the same range in both."""
    for axis in axes_of(value):
        if -axis > len(to) or not known(shape[axis] == to[axis]):
            raise Unknown(f"the sizes {tuple(shape)} and {tuple(to)} are not known to agree")
    return value


def settled(value: Value, example: Tensor) -> Value:
    """The value as the tensor holds it: in its dtype, and free of the indices that are always 0."""
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
    """A number as the dtype holds it; Unknown where rounding or overflow might change it.

    Floats are 0, 1 or -1, infinite, or so large that only their sign matters.
    """
    constant, slopes = leaf.constant, leaf.slopes
    if dtype.is_floating_point:
        if isinstance(constant, (int, float)) and not slopes:
            constant = float(constant)
            if abs(constant) > torch.finfo(dtype).max:
                constant = float("inf") if constant > 0 else -float("inf")
            if constant in (0.0, 1.0, -1.0) or abs(constant) >= 1e30:
                return affine(constant)
    elif isinstance(constant, float):
        if constant in (0.0, 1.0):
            return affine(int(constant))
    elif dtype in (torch.int64, torch.int32):
        bits = torch.iinfo(dtype).bits
        small = isinstance(constant, torch.SymInt) or abs(constant) < 2 ** (bits - 2)
        if small and sum(map(abs, slopes.values())) <= (2 if bits == 32 else 2**20):
            return leaf
    elif not slopes and not isinstance(constant, torch.SymInt) and constant in (0, 1):
        return leaf
    raise Unknown(f"it holds numbers that {dtype} may round or overflow")


def rule(*names: str) -> Callable[[Rule], Rule]:
    def decorate(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return decorate


def shape_of(node: Any) -> Sequence[Size]:
    return traced(node).shape


def axis_of(node: fx.Node, dim: Any) -> int:
    if not isinstance(dim, int) or isinstance(dim, bool):
        raise Unknown(f"a dimension of {node.name} is not a constant")
    return dim - traced(node).dim() if dim >= 0 else dim


def size(argument: Any) -> Size:
    """A whole number that is known, as itself or by its symbol."""
    example = traced(argument)
    if isinstance(example, bool) or not isinstance(example, (int, torch.SymInt)):
        raise Unknown(f"{argument} is not a whole number that is known")
    return example


def accept(options: Mapping[str, Any], *names: str) -> None:
    """Refuse options other than those that say where and how a tensor is kept."""
    if set(options) - {*names, "device", "layout", "requires_grad", "pin_memory"}:
        raise Unknown(f"the options {sorted(options)} are not known here")
