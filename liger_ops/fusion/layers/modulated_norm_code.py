"""Write the forward of a module that modulates norms as lines of Python that call the ops.

A line is a call of a child, a view, a cast to x's dtype, silu, or an op for a norm and its
modulation. A graph with anything else is left.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from ...library import OPS
from ...rewrites.engine.canonical import IDENTITY, calls, canonical, value
from ...rewrites.engine.canonical.call import operation
from ...rewrites.engine.pattern import CHEAP
from ..probing import NotAnOp

MODULATED = ("modulated_layer_norm", "modulated_rms_norm")
TENSORS = ("x", "scale", "shift", "weight", "bias")

# The operations that a forward may contain beside its children and norms, by their names in torch.
FUNCTIONS = ("chunk", "silu", "split", "unbind", "unsqueeze")
# Names of arguments that are the same for the function and the method.
NAMED = {"dim", "chunks", "inplace"}

CONSTANTS = (type(None), bool, int, float, str, torch.dtype)

# A child's name, and its arguments, of nodes and constants.
ChildCall = tuple[str, tuple[Any, ...], dict[str, Any]]
Options = tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class Op:
    """A modulated norm, the dimensions of x and scale, and its options."""

    name: str
    ranks: tuple[int, int]
    options: Options


@dataclass(frozen=True)
class Program:
    """A forward as lines of Python, of the arguments that it uses.

    `modulate(i, ...)` in a line is the i-th of `ops`. With `is_cast`, autocast casts the inputs of
    the module's norms; else the norms are in the dtypes of their inputs.
    """

    used: tuple[str, ...]
    lines: tuple[str, ...]
    ops: tuple[Op, ...]
    is_cast: bool


@dataclass
class Code:
    """What the placeholders of a graph are: tensors of the module, by their expressions, or the
    results of calls of children.

    `casts` says what becomes of casts to x's dtype: "refused", "dropped" or "to x". `options` are
    those of the ops in a narrow dtype, where casting modes differ, or None.
    """

    sources: Mapping[str, str]
    calls: Mapping[str, ChildCall]
    arguments: Collection[str]
    dtype: torch.dtype
    casts: str
    options: tuple[Options, ...] | None

    def program(self, graph: fx.Graph, form: Any, is_cast: bool) -> Program:
        """The program that returns the graph's first results, in the form of a pytree.

        Raises:
            NotAnOp: a line cannot be written; the text gives the reason.
        """
        (output,) = (node for node in graph.nodes if node.op == "output")
        self.names: dict[fx.Node, str] = {}
        self.ops: list[Op] = []
        lines: list[str] = []
        needed = _needed(output)
        for node in graph.nodes:
            is_call = node.op == "placeholder" and node.target in self.calls
            if node is output or (node not in needed and not is_call):
                _check_unused(node)
                continue
            text = self._text(node)
            # A source, or the result of an operation that returns its argument.
            if text in self.sources.values() or text in self.names.values():
                self.names[node] = text
                continue
            self.names[node] = f"v{len(lines)}"
            lines.append(f"{self.names[node]} = {text}")
        returned = pytree.tree_unflatten([self.names[node] for node in output.args[0][0]], form)
        if isinstance(returned, tuple) and not all(isinstance(one, str) for one in returned):
            raise NotAnOp("it returns tuples of tuples")
        text = returned if isinstance(returned, str) else f"({', '.join(returned)},)"
        known = {self.names.get(node) for node in needed}
        used = tuple(name for name in self.arguments if name in known)
        return Program(used, (*lines, f"return {text}"), tuple(self.ops), is_cast)

    def _text(self, node: fx.Node) -> str:
        """The expression of a node, of the names of others."""
        if node.op == "placeholder":
            return self._given(str(node.target))
        if op_of(node) in MODULATED:
            return self._op(node)
        cast = calls(node, "cast")
        if cast is not None:
            return self._cast(*cast.args)
        function = operation(node)
        if function == "getitem":
            return f"{self._name(node.args[0])}[{_index(node.args[1])}]"
        if function in FUNCTIONS and not node.kwargs.keys() - NAMED:
            return f"{function}({self._arguments(node.args, node.kwargs)})"
        call = canonical(node)
        if call is not None and call.op == IDENTITY:
            return self._name(call.args[0])
        what = function or op_of(node) or node.name
        raise NotAnOp(f"it computes {what} beside its norms and projections")

    def _given(self, target: str) -> str:
        if target in self.calls:
            name, args, kwargs = self.calls[target]
            return f"getattr(self, {name!r})({self._arguments(args, kwargs)})"
        if target not in self.sources:
            raise NotAnOp(f"it reads a tensor that is not among its arguments: {target}")
        return self.sources[target]

    def _cast(self, source: Any, dtype: Any) -> str:
        if self.casts == "refused" or dtype is not self.dtype:
            raise NotAnOp(f"it casts to {dtype} beside its norms")
        x, *_ = self.arguments
        text = self._name(source)
        return text if self.casts == "dropped" else f"{text}.to({x}.dtype)"

    def _op(self, node: fx.Node) -> str:
        name = op_of(node)
        assert name is not None
        bound = inspect.signature(OPS[name].definition).bind(*node.args, **node.kwargs)
        bound.apply_defaults()
        options = dict(bound.arguments)
        tensors = [options.pop(key) for key in TENSORS if key in options]
        if self.options is not None and len(self.ops) < len(self.options):
            # In float32 the casting modes are equal.
            options["casting_mode"] = dict(self.options[len(self.ops)])["casting_mode"]
        ranks = (value(tensors[0]).dim(), value(tensors[1]).dim())
        self.ops.append(Op(name, ranks, tuple(options.items())))
        texts = ("None" if one is None else self._name(one) for one in tensors)
        return f"modulate({len(self.ops) - 1}, {', '.join(texts)})"

    def _arguments(self, args: Any, kwargs: Any) -> str:
        if kwargs.get("inplace"):
            raise NotAnOp("it writes in place")
        texts = (self._argument(one) for one in args)
        return ", ".join([*texts, *(f"{name}={self._argument(kwargs[name])}" for name in kwargs)])

    def _argument(self, one: Any) -> str:
        if isinstance(one, fx.Node):
            return self._name(one)
        if not isinstance(one, CONSTANTS):
            raise NotAnOp(f"it passes on a {type(one).__name__}")
        return repr(one)

    def _name(self, node: Any) -> str:
        if not isinstance(node, fx.Node) or node not in self.names:
            raise NotAnOp(f"it computes {node} in a way that is not known")
        return self.names[node]


def op_of(node: fx.Node) -> str | None:
    """The op of liger_ops that a node calls."""
    is_op = getattr(node.target, "namespace", None) == "liger"
    return node.target._opname if is_op else None  # type: ignore[union-attr]


def _needed(output: fx.Node) -> set[fx.Node]:
    needed, waiting = set(), [output]
    while waiting:
        node = waiting.pop()
        if node not in needed:
            needed.add(node)
            waiting += node.all_input_nodes
    return needed


def _check_unused(node: fx.Node) -> None:
    call = canonical(node)
    is_view = call is not None and call.op in {*CHEAP, IDENTITY, "item", "unbind"}
    if node.op not in ("placeholder", "output") and not is_view:
        raise NotAnOp(f"it does more than compute its results: {node.name}")


def _index(index: Any) -> str:
    parts = index if isinstance(index, tuple) else (index,)
    if not all(part is None or part == slice(None) or type(part) is int for part in parts):
        raise NotAnOp(f"it takes the item {index}")
    return ", ".join(":" if isinstance(part, slice) else repr(part) for part in parts)
