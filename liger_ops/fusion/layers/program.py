"""Programs: the code of a module as calls of children, ops and PyTorch, written from its graph."""

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
from ...rewrites.engine.report import bound, definition_of, op_of
from ..probing import NotAnOp
from .module_trace import OF_CHILD, PARAMETER, Traced

# Kinds of steps, and the names of the steps that are not functions of torch: casts and indices.
OP, CHILD, FUNCTION = "op", "child", "function"
TUPLE = "child that returns a tuple"
CAST, INDEX = "cast", "getitem"
MODE = "casting_mode"
# Keyword arguments that a function of torch and the method of the same name share.
SHARED_KEYWORDS = {"dim", "chunks", "inplace"}

CONSTANTS = (type(None), bool, int, float, str, torch.dtype)
NO_CASTS: Mapping[torch.dtype, int] = {}


@dataclass(frozen=True)
class Value:
    """The value of an argument or of a step, by index: steps are numbered after the arguments."""

    index: int


@dataclass(frozen=True)
class Parameter:
    """A parameter, by the name of the child that holds it ("" for the module) and its own name."""

    path: tuple[str, str]


@dataclass(frozen=True)
class ProgramStep:
    """A call of an op, of a child or of a function, by its name.

    The last of `args` are passed by the names in `keywords`. An op has all its arguments in `args`.
    """

    kind: str
    name: str
    args: tuple[Any, ...]
    keywords: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.kind == OP:
            constants = [f"{name}={value!r}" for name, value in self.options().items()]
        else:
            constants = [repr(value) for value in self.args if isinstance(value, CONSTANTS)]
        name = self.name.removesuffix("_forward")
        return f"{name}({', '.join(constants)})" if constants else name

    def options(self) -> dict[str, Any]:
        """Return the arguments of an op that are not tensors, by name."""
        parameters = inspect.signature(definition_of(self.name)).parameters.values()
        return {
            parameter.name: value
            for parameter, value in zip(parameters, self.args, strict=True)
            if "Tensor" not in str(parameter.annotation)
        }


@dataclass(frozen=True)
class Program:
    """The steps of a method, and the values that it returns.

    `used` are the names of the arguments that the steps use.
    """

    arguments: tuple[str, ...]
    used: tuple[str, ...]
    steps: tuple[ProgramStep, ...]
    returned: Value | tuple[Value, ...]

    @property
    def ops(self) -> list[ProgramStep]:
        return [step for step in self.steps if step.kind == OP]

    def __str__(self) -> str:
        shown = (step for step in self.steps if step.kind == OP or step.name == "mul")
        return " and ".join(map(str, shown))

    def rounding_as(self, other: Program) -> Program:
        """Return the program with the casting modes of another one.

        In float32 and float64 nothing is rounded in between, so that a trace fits every mode.
        """
        modes = [op.options().get(MODE) for op in other.ops]
        steps = list(self.steps)
        for i, mode in zip(
            (i for i, step in enumerate(steps) if step.kind == OP), modes, strict=False
        ):
            names = list(inspect.signature(definition_of(steps[i].name)).parameters)
            if mode is not None and MODE in names:
                given = dict(zip(names, steps[i].args, strict=True))
                steps[i] = replace(steps[i], args=tuple({**given, MODE: mode}.values()))
        return replace(self, steps=tuple(steps))


def write_program(
    traced: Traced, ops: Collection[str], functions: Collection[str],
    dropped: Collection[torch.dtype] = (), kept: Mapping[torch.dtype, int] = NO_CASTS,
) -> Program:  # fmt: skip
    """Return the program of a traced graph.

    Args:
        traced: a trace, after rewrites.
        ops, functions: the names of the ops, and of the functions of torch, that it may contain.
        dropped: the dtypes to which a cast is left out, if `is_dropped_cast`.
        kept: the dtypes to which a cast is a step, each with the index of the argument that has
            this dtype in a call. Other casts are refused.

    Raises:
        NotAnOp: the graph contains something else; the text gives the reason.
    """
    return _ProgramWriter(traced, ops, functions, dropped, kept).program()


class _ProgramWriter:
    def __init__(
        self, traced: Traced, ops: Collection[str], functions: Collection[str],
        dropped: Collection[torch.dtype], kept: Mapping[torch.dtype, int],
    ) -> None:  # fmt: skip
        self.traced, self.arguments = traced, traced.arguments
        self.ops, self.functions, self.dropped, self.kept = ops, functions, dropped, kept
        self.calls = traced.called()
        self.values: dict[fx.Node, Any] = {}
        self.results: dict[str, Value] = {}
        self.steps: list[ProgramStep] = []

    def program(self) -> Program:
        output = self.traced.output
        needed = needed_by(output)
        for node in self.traced.graph.graph.nodes:
            if OF_CHILD in node.meta:
                self.result_of_child(node, *node.meta[OF_CHILD])
                continue
            is_call = node.op == "placeholder" and node.target in self.calls
            if node is output or (node not in needed and not is_call):
                _check_unused(node)
                continue
            self.values[node] = self.value_of(node)
        leaves = [self.argument(one) for one in output.args[0][0]]  # type: ignore[index,union-attr]
        returned = pytree.tree_unflatten(leaves, self.traced.structure)
        used = {self.values.get(node) for node in needed}
        names = tuple(name for i, name in enumerate(self.arguments) if Value(i) in used)
        return Program(self.arguments, names, tuple(self.steps), returned)

    def result_of_child(self, node: fx.Node, key: str, index: int | None) -> None:
        """Write the call of a child at the first node of its code, and an index step for a result.

        index: that of the node in the tuple that the child returns, None if it is no result.
        """
        if key not in self.results:
            name, args, kwargs = self.calls[key]
            arguments = (*args, *kwargs.values())
            self.results[key] = self.step(TUPLE, name, arguments, tuple(kwargs))
        if index is not None:
            self.values[node] = self.step(FUNCTION, INDEX, (self.results[key], index))

    def value_of(self, node: fx.Node) -> Value | Parameter:
        """Return the value of a node. A step is written for it, unless it is an input or equal to
        the value of another node.

        Raises:
            NotAnOp: the node is none of the ops, functions and casts of the program.
        """
        if node.op == "placeholder":
            return self.input_value(str(node.target))
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
            # A number in the model's code may be the left factor.
            source, factor = sorted(call.args, key=lambda operand: not isinstance(operand, fx.Node))
            if isinstance(factor, (int, float)):
                return self.step(FUNCTION, "mul", (source, factor))
        elif (
            function is not None
            and function in self.functions
            and not node.kwargs.keys() - SHARED_KEYWORDS
        ):
            if node.kwargs.get("inplace"):
                raise NotAnOp("it writes in place")
            keywords = tuple(node.kwargs)
            return self.step(FUNCTION, function, (*node.args, *node.kwargs.values()), keywords)
        raise NotAnOp(f"it computes {function or name or node.name} beside {self.op_names()}")

    def op_names(self) -> str:
        ops = (str(op_of(node)) for node in self.traced.graph.graph.nodes)
        names = dict.fromkeys(op.removesuffix("_forward") for op in ops if op in self.ops)
        return " and ".join(names)

    def input_value(self, target: str) -> Value | Parameter:
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
        if dtype in self.dropped and is_dropped_cast(source, dtype, self.traced.case.dtype):
            return self.argument(source)
        if dtype not in self.kept:
            raise NotAnOp(f"it casts to {dtype} beside {self.op_names()}")
        return self.step(FUNCTION, CAST, (source, Value(self.kept[dtype])))

    def step(
        self, kind: str, name: str, args: tuple[Any, ...], keywords: tuple[str, ...] = ()
    ) -> Value:
        step = ProgramStep(kind, name, tuple(map(self.argument, args)), keywords)
        self.steps.append(step)
        return Value(len(self.arguments) + len(self.steps) - 1)

    def argument(self, value: Any) -> Any:
        if isinstance(value, fx.Node):
            if value not in self.values:
                raise NotAnOp(f"it computes {value} in a way that is not known")
            return self.values[value]
        is_shape = type(value) is tuple and all(type(size) is int for size in value)
        if not is_shape and not isinstance(value, (Value, *CONSTANTS)):
            raise NotAnOp(f"it passes on a {type(value).__name__}")
        return value


def is_dropped_cast(source: Any, dtype: torch.dtype, of_input: torch.dtype) -> bool:
    """Return whether a cast needs no step: it changes no value, or rounds to the dtype of the
    input, as the op does."""
    source_dtype = dtype_of(source)
    return dtype is of_input or (source_dtype is not None and represents(dtype, source_dtype))


def _check_unused(node: fx.Node) -> None:
    """Raise NotAnOp for a node that no result needs, unless it is a view or a cast."""
    call = canonical(node)
    is_view = node.target is operator.getitem or (
        call is not None and call.op in {*CHEAP, IDENTITY, "item", "unbind"}
    )
    if node.op not in ("placeholder", "output") and not is_view:
        raise NotAnOp(f"it does more than compute its result: {node.name}")


def _index(index: Any) -> tuple[Any, ...]:
    """Return the items of an index, with ":" for a whole dimension."""
    items = index if isinstance(index, tuple) else (index,)
    if not all(item is None or item == slice(None) or type(item) is int for item in items):
        raise NotAnOp(f"it takes the item {index}")
    return tuple(":" if isinstance(item, slice) else item for item in items)
