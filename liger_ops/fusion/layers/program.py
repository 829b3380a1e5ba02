"""What a module computes, as calls of its children, of PyTorch and of ops: written from a graph."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from ...rewrites.engine.canonical import IDENTITY, calls, canonical
from ...rewrites.engine.canonical.call import operation
from ...rewrites.engine.casts import dtype_of, represents
from ...rewrites.engine.graph_state import needed_by
from ...rewrites.engine.pattern import CHEAP
from ...rewrites.engine.recognise import bound, definition_of, op_of
from ..probing import NotAnOp
from .module_trace import OF_CHILD, PARAMETER, Traced

# What a step calls, and the functions that have other names in torch.
OP, CHILD, FUNCTION = "op", "child", "function"
TUPLE = "child that returns a tuple"
CAST, INDEX = "cast", "getitem"
MODE = "casting_mode"
# Names of arguments that are the same for the function and the method.
NAMED = {"dim", "chunks", "inplace"}

CONSTANTS = (type(None), bool, int, float, str, torch.dtype)
NO_CASTS: Mapping[torch.dtype, int] = {}


@dataclass(frozen=True)
class Value:
    """The value of an argument or, after these, of a step."""

    index: int


@dataclass(frozen=True)
class Parameter:
    """A parameter of the module, or of the child `holder`."""

    path: tuple[str, str]


@dataclass(frozen=True)
class Step:
    """A call of an op, with all its arguments, of a child or of a function, by its name. The last
    of `args` are given by the names in `keywords`."""

    kind: str
    name: str
    args: tuple[Any, ...]
    keywords: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.kind == OP:
            given = [f"{name}={one!r}" for name, one in self.options().items()]
        else:
            given = [repr(one) for one in self.args if isinstance(one, CONSTANTS)]
        name = self.name.removesuffix("_forward")
        return f"{name}({', '.join(given)})" if given else name

    def options(self) -> dict[str, Any]:
        """The arguments of an op that are no tensors."""
        parameters = inspect.signature(definition_of(self.name)).parameters.values()
        return {
            one.name: given
            for one, given in zip(parameters, self.args, strict=True)
            if "Tensor" not in str(one.annotation)
        }


@dataclass(frozen=True)
class Program:
    """Steps, of the arguments that they use, and the values that are returned."""

    arguments: tuple[str, ...]
    used: tuple[str, ...]
    steps: tuple[Step, ...]
    returned: Value | tuple[Value, ...]

    @property
    def ops(self) -> list[Step]:
        return [step for step in self.steps if step.kind == OP]

    def __str__(self) -> str:
        said = (step for step in self.steps if step.kind == OP or step.name == "mul")
        return " and ".join(map(str, said))

    def rounding_as(self, other: Program) -> Program:
        """The program with the casting modes of another. In float32 and float64, where nothing is
        rounded in between, all modes are equal."""
        modes = [op.options().get(MODE) for op in other.ops]
        steps = list(self.steps)
        for i, mode in zip(
            (i for i, one in enumerate(steps) if one.kind == OP), modes, strict=False
        ):
            names = list(inspect.signature(definition_of(steps[i].name)).parameters)
            if mode is not None and MODE in names:
                given = dict(zip(names, steps[i].args, strict=True))
                steps[i] = replace(steps[i], args=tuple({**given, MODE: mode}.values()))
        return replace(self, steps=tuple(steps))


def written(
    traced: Traced, ops: Collection[str], functions: Collection[str],
    dropped: Collection[torch.dtype] = (), kept: Mapping[torch.dtype, int] = NO_CASTS,
) -> Program:  # fmt: skip
    """The program of a graph.

    ops, functions: which ops, and functions of torch, it may contain, by their names. dropped: the
    dtypes to which casts are no steps. kept: those to which they are, each with the index of the
    argument whose dtype it is. Other casts are refused.

    Raises:
        NotAnOp: it computes something else; the text gives the reason.
    """
    return _Writer(traced, ops, functions, dropped, kept).program()


class _Writer:
    def __init__(
        self, traced: Traced, ops: Collection[str], functions: Collection[str],
        dropped: Collection[torch.dtype], kept: Mapping[torch.dtype, int],
    ) -> None:  # fmt: skip
        self.traced, self.arguments = traced, traced.arguments
        self.ops, self.functions, self.dropped, self.kept = ops, functions, dropped, kept
        self.calls = traced.called()
        self.values: dict[fx.Node, Any] = {}
        self.results: dict[str, Value] = {}
        self.steps: list[Step] = []

    def program(self) -> Program:
        output = self.traced.output
        needed = needed_by(output)
        for node in self.traced.graph.graph.nodes:
            if OF_CHILD in node.meta:
                self.result_of_child(node, *node.meta[OF_CHILD])
                continue
            is_call = node.op == "placeholder" and node.target in self.calls
            if node is output or (node not in needed and not is_call):
                check_unused(node)
                continue
            self.values[node] = self.value_of(node)
        leaves = [self.argument(one) for one in output.args[0][0]]  # type: ignore[index,union-attr]
        returned = pytree.tree_unflatten(leaves, self.traced.form)
        used = {self.values.get(node) for node in needed}
        names = tuple(name for i, name in enumerate(self.arguments) if Value(i) in used)
        return Program(self.arguments, names, tuple(self.steps), returned)

    def result_of_child(self, node: fx.Node, key: str, place: int | None) -> None:
        """Write the call of a child at the first node of its code, and its results."""
        if key not in self.results:
            name, args, kwargs = self.calls[key]
            given = (*args, *kwargs.values())
            self.results[key] = self.step(TUPLE, name, given, tuple(kwargs))
        if place is not None:
            self.values[node] = self.step(FUNCTION, INDEX, (self.results[key], place))

    def value_of(self, node: fx.Node) -> Value | Parameter:
        """The value of a node, for which a step is written if it is neither an input nor the same
        as another's."""
        if node.op == "placeholder":
            return self.given(str(node.target))
        name = op_of(node)
        if name is not None and name in self.ops:
            ((_, given),) = bound([node])
            return self.step(OP, name, tuple(given.values()))
        cast = calls(node, "cast")
        if cast is not None:
            return self.cast(*cast.args)
        function = operation(node)
        if function == INDEX:
            source, index = node.args
            return self.step(FUNCTION, INDEX, (source, *_index(index)))
        call = canonical(node)
        if call is not None and call.op == IDENTITY:
            return self.argument(call.args[0])
        if call is not None and call.op == "view" and "reshape" in self.functions:
            return self.step(FUNCTION, "reshape", call.args)
        if call is not None and call.op == "mul" and "mul" in self.functions:
            # Of a tensor and a number.
            source, factor = sorted(call.args, key=lambda one: not isinstance(one, fx.Node))
            if isinstance(factor, (int, float)):
                return self.step(FUNCTION, "mul", (source, factor))
        elif function is not None and function in self.functions and not node.kwargs.keys() - NAMED:
            if node.kwargs.get("inplace"):
                raise NotAnOp("it writes in place")
            keywords = tuple(node.kwargs)
            return self.step(FUNCTION, function, (*node.args, *node.kwargs.values()), keywords)
        raise NotAnOp(f"it computes {function or name or node.name} beside {self.beside()}")

    def beside(self) -> str:
        ops = (str(op_of(node)) for node in self.traced.graph.graph.nodes)
        found = dict.fromkeys(op.removesuffix("_forward") for op in ops if op in self.ops)
        return " and ".join(found)

    def given(self, target: str) -> Value | Parameter:
        if target in self.arguments:
            return Value(self.arguments.index(target))
        if target.startswith(PARAMETER):
            holder, _, name = target.removeprefix(PARAMETER).rpartition(".")
            return Parameter((holder, name))
        if target in self.calls:
            name, args, kwargs = self.calls[target]
            return self.step(CHILD, name, (*args, *kwargs.values()), tuple(kwargs))
        raise NotAnOp(f"it reads a tensor that is not among its arguments: {target}")

    def cast(self, source: Any, dtype: Any) -> Value | Parameter:
        if dtype in self.dropped and is_no_step(source, dtype, self.traced.case.dtype):
            return self.argument(source)
        if dtype not in self.kept:
            raise NotAnOp(f"it casts to {dtype} beside {self.beside()}")
        return self.step(FUNCTION, CAST, (source, Value(self.kept[dtype])))

    def step(
        self, kind: str, name: str, args: tuple[Any, ...], keywords: tuple[str, ...] = ()
    ) -> Value:
        step = Step(kind, name, tuple(map(self.argument, args)), keywords)
        self.steps.append(step)
        return Value(len(self.arguments) + len(self.steps) - 1)

    def argument(self, one: Any) -> Any:
        if isinstance(one, fx.Node):
            if one not in self.values:
                raise NotAnOp(f"it computes {one} in a way that is not known")
            return self.values[one]
        is_shape = type(one) is tuple and all(type(size) is int for size in one)
        if not is_shape and not isinstance(one, (Value, *CONSTANTS)):
            raise NotAnOp(f"it passes on a {type(one).__name__}")
        return one


def is_no_step(source: Any, dtype: torch.dtype, of_input: torch.dtype) -> bool:
    """Whether a cast changes no value, or rounds to the dtype of the input, as the op does."""
    before = dtype_of(source)
    return dtype is of_input or (before is not None and represents(dtype, before))


def check_unused(node: fx.Node) -> None:
    """Raise NotAnOp for a node that no result needs, unless it is a view or a cast."""
    call = canonical(node)
    is_view = node.target is operator.getitem or (
        call is not None and call.op in {*CHEAP, IDENTITY, "item", "unbind"}
    )
    if node.op not in ("placeholder", "output") and not is_view:
        raise NotAnOp(f"it does more than compute its result: {node.name}")


def _index(index: Any) -> tuple[Any, ...]:
    """The parts of an index, where ":" stands for a whole dimension."""
    parts = index if isinstance(index, tuple) else (index,)
    if not all(part is None or part == slice(None) or type(part) is int for part in parts):
        raise NotAnOp(f"it takes the item {index}")
    return tuple(":" if isinstance(part, slice) else part for part in parts)
