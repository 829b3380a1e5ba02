"""Trace a module, with its parameters and the results of its children as inputs of the graph."""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from ...torch_private import DataDependentOutputException
from .. import classes
from ..asked import is_library_code, watched
from ..assumptions import Reads
from ..probing import MODULE_STATE, NotAnOp, dtype_name, first_line, own_attributes
from ..sharding import shape_of
from ..trace import Trace

# A child's name, and the arguments of its call: nodes and constants.
ChildCall = tuple[str, tuple[Any, ...], dict[str, Any]]

PARAMETER = "self."
# Key in a node's meta for a pair: the call of a child that computes the node, by its name in
# `Traced.calls`, and the node's index in the tuple that the child returns, None if it is no result.
OF_CHILD = "liger_ops.of_child"


class FailsInTrace(NotAnOp):
    """The code raised an exception in a trace: it does not accept such arguments."""


@dataclass(frozen=True)
class Case:
    """The arguments and modes with which a module is called in a trace.

    Attributes:
        shapes, dtypes: those of the tensor arguments, by name.
        parameters: the dtype of all parameters.
        columns: the size of the last dimension of a child's result, or its whole shape, by the
            child's name. Any other child returns the shape and dtype that it is given.
        results: the dtype of the results of the children in `columns`, or None for the dtype that
            they are given.
        training: whether the module is in training mode.
        constants: the arguments that are not tensors, by name.
        tolerates: the exceptions in this case after which the module is not left: its own code
            runs in such calls.
    """

    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, torch.dtype]
    parameters: torch.dtype
    columns: Mapping[str, int | tuple[int, ...]] = field(default_factory=dict)
    results: torch.dtype | None = None
    training: bool = True
    constants: Mapping[str, Any] = field(default_factory=dict)
    tolerates: type[NotAnOp] | tuple[()] = ()

    @property
    def first(self) -> str:
        return next(iter(self.shapes))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the first argument."""
        return self.dtypes[self.first]

    def __str__(self) -> str:
        x, parameters = map(dtype_name, (self.dtype, self.parameters))
        mode = "training" if self.training else "evaluation"
        dtypes = x if x == parameters else f"{x}, parameters {parameters}"
        return f"{dtypes}, {len(self.shapes[self.first])} dimensions, {mode}"


@dataclass(frozen=True)
class Traced:
    """The graph of a case.

    A placeholder of the graph is an argument; a parameter, named by PARAMETER and its path; or the
    result of a child's call, named by the call's key in `calls`. The graph returns the leaves of
    the module's result, and the tensors that children are given.

    Attributes:
        arguments: the names of the method's arguments.
        result: the value that the method returned, with tensors without data.
        structure: the pytree structure of the result.
        calls: the calls of children, by key, also of those whose code is in the graph.
    """

    case: Case
    arguments: tuple[str, ...]
    result: Any
    graph: fx.GraphModule
    structure: Any
    calls: Mapping[str, ChildCall]

    @property
    def output(self) -> fx.Node:
        (output,) = (node for node in self.graph.graph.nodes if node.op == "output")
        return output

    def called(self) -> dict[str, ChildCall]:
        """Return the calls of children, with the graph's nodes for tensors.

        The nodes are taken from the graph's output, because rewrites may have replaced others.
        """
        tensors = [
            x for x in pytree.tree_leaves(list(self.calls.values())) if isinstance(x, Tensor)
        ]
        nodes = dict(zip(map(id, tensors), self.output.args[0][1], strict=True))  # type: ignore[index,arg-type]
        found: dict[str, ChildCall] = pytree.tree_map(
            lambda x: nodes.get(id(x), x), dict(self.calls)
        )
        return found


class ModuleTrace:
    """Traces of a copy of a module, in which the children `called` are stand-ins.

    Other children are copied, and their code is traced as part of the module's. The calls of those
    in `kept` are recorded too.
    """

    def __init__(
        self, module: nn.Module, called: Collection[str], method: str, kept: Collection[str] = ()
    ) -> None:
        self.reads = Reads(called, kept)
        self.kept = kept
        self.method = method
        self.copy = object.__new__(classes.class_of(module))
        # Parameters are replaced in each trace, and are not copied.
        memo: dict[int, Any] = {id(parameter): parameter for parameter in module.parameters()}
        try:
            attributes = {
                name: copy.deepcopy(value, memo) if type(value) in (list, dict, set) else value
                for name, value in own_attributes(module).items()
            }
            children = {
                name: copy.deepcopy(child, memo)
                for name, child in module._modules.items()
                if name not in called
            }
        except Exception as error:
            raise NotAnOp(f"it cannot be copied: {first_line(error)}") from None
        self.children = {**dict.fromkeys(module._modules), **children}
        vars(self.copy).update(vars(module), **attributes)
        self.shapes = {
            ".".join((*path.split("."), name)).lstrip("."): shape_of(parameter)
            for path, child in [("", module), *((n, c) for n, c in children.items() if c)]
            for name, parameter in child._parameters.items()
            if parameter is not None
        }
        self.called = called
        self.arguments = names_of(getattr(module, method))

    def run(self, case: Case) -> Traced:
        """Trace one call.

        Raises:
            NotAnOp: the code does more than compute a result from its arguments.
            FailsInTrace: the code raises an exception.
        """
        trace = Trace()
        calls: dict[str, ChildCall] = {}
        for name, value in case.constants.items():
            trace.graph.placeholder(name).meta["example_value"] = value
        arguments = {
            name: trace.input(name, shape, case.dtypes[name]) for name, shape in case.shapes.items()
        }
        parameters = {
            path: trace.input(PARAMETER + path, tuple(shape), case.parameters)
            for path, shape in self.shapes.items()
        }
        self._set_parameters(parameters)
        stand_ins = {name: StandIn(name, case, trace, calls) for name in self.called}
        vars(self.copy)["_modules"] = {**self.children, **stand_ins}
        before = own_attributes(self.copy.train(case.training))
        asked: list[Any] = []

        def is_stand_in(value: Any) -> bool:
            return isinstance(value, Tensor) or value is self.copy or value in stand_ins.values()

        try:
            with self.reads.of(self.copy), trace.running(), watched(is_stand_in, asked):
                for name in self.kept:
                    self._record_calls(name, trace, calls)
                # The method is called directly, because a call of the module would run its hooks.
                method = getattr(self.copy, self.method)
                is_whole = len(arguments) == len(self.arguments)
                result = (
                    method(*arguments.values())
                    if is_whole
                    else method(**arguments, **case.constants)
                )
        except NotAnOp:
            raise
        except Exception as error:
            what = "it" if self.method == "forward" else f"its {self.method}"
            text = f"{what} fails on fake tensors ({case}): {first_line(error)}"
            reads_values = isinstance(error, DataDependentOutputException)
            raise (NotAnOp if reads_values else FailsInTrace)(text) from None
        if asked:
            what = "a tensor" if isinstance(asked[0], Tensor) else "a module"
            raise NotAnOp(f"it asks for the class of {what}")
        if list(map(id, before.values())) != list(map(id, own_attributes(self.copy).values())):
            raise NotAnOp("its forward changes its attributes")
        leaves, structure = pytree.tree_flatten(result)
        asked = [x for x in pytree.tree_leaves(list(calls.values())) if isinstance(x, Tensor)]
        graph = trace.module((leaves, asked))
        return Traced(case, self.arguments, result, graph, structure, calls)

    def _record_calls(self, name: str, trace: Trace, calls: dict[str, ChildCall]) -> None:
        """Make a child whose code is traced record its calls, and mark the nodes of its code."""
        child: Any = self.children[name]

        def forward(*args: Any, **kwargs: Any) -> Any:
            start = len(trace.graph.nodes)
            result = type(child).forward(child, *args, **kwargs)
            new_nodes, key = list(trace.graph.nodes)[start:], f"{name}.{len(calls)}"
            calls[key] = (name, args, kwargs)
            for node in new_nodes:
                node.meta[OF_CHILD] = key, None
            for i, node in enumerate(map(trace.node, result)):
                if type(result) is not tuple or node not in new_nodes:
                    raise NotAnOp(f"{name} returns more than a tuple of tensors that it computes")
                node.meta[OF_CHILD] = key, i
            return result

        vars(child)["forward"] = forward

    def _set_parameters(self, parameters: Mapping[str, Tensor]) -> None:
        for path in {path.rpartition(".")[0] for path in parameters}:
            module = self.children[path] if path else self.copy
            values = {
                name: parameters.get(f"{path}.{name}" if path else name)
                for name in vars(module)["_parameters"]
            }
            vars(module)["_parameters"] = values


class StandIn(nn.Module):
    """A stand-in for a child, which records its arguments and returns a tensor without data."""

    def __init__(self, name: str, case: Case, trace: Trace, calls: dict[str, ChildCall]) -> None:
        super().__init__()
        self.name, self.case, self.trace, self.calls = name, case, trace, calls

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        if is_library_code(sys._getframe(1)):
            return StandIn
        raise NotAnOp(f"it asks for the class of its {self.name}")

    def __getattr__(self, name: str) -> Any:
        if name in MODULE_STATE or is_library_code(sys._getframe(1)):
            raise AttributeError(name)
        raise NotAnOp(f"it reads {name} of its {self.name}")

    def named_modules(self, *args: Any, **kwargs: Any) -> Any:
        if self.trace.is_watching:
            raise NotAnOp(f"it looks for modules or parameters in its {self.name}")
        return super().named_modules(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        tensors = [
            value for value in pytree.tree_leaves((args, kwargs)) if isinstance(value, Tensor)
        ]
        if not tensors:
            raise NotAnOp(f"{self.name} is given no tensor")
        shape, dtype = tuple(tensors[0].shape), tensors[0].dtype
        if self.name in self.case.columns:
            columns = self.case.columns[self.name]
            shape = columns if isinstance(columns, tuple) else (*shape[:-1], columns)
            dtype = self.case.results or dtype
        key = f"{self.name}.{len(self.calls)}"
        self.calls[key] = (self.name, args, kwargs)
        return self.trace.input(key, shape, dtype)


def names_of(method: Any) -> tuple[str, ...]:
    """Return the names of a method's arguments, except for *args and **kwargs."""
    parameters = inspect.signature(method).parameters.values()
    rest = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return tuple(parameter.name for parameter in parameters if parameter.kind not in rest)
