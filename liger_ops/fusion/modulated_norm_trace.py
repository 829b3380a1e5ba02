"""Trace a module that modulates norms, and write its forward again with the ops.

The module's code runs on tensors without data. What it calls is written down as lines of Python:
calls of children, views, casts to x's dtype, silu, and the ops that the rewrites of the backend
find for a norm and its modulation. Code that does anything else is left.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from ..library import OPS
from ..lowering.passes import rewrite
from ..lowering.passes.canonical import IDENTITY, calls, canonical, value
from ..lowering.passes.canonical.call import operation
from ..lowering.passes.pattern import CHEAP
from .probing import NotAnOp, first_line, own_attributes
from .trace import Trace

NORM_OPS = ("layer_norm", "rms_norm")
MODULATED = ("modulated_layer_norm", "modulated_rms_norm")

# The operations that a forward may contain beside its children and norms, by their names in torch.
FUNCTIONS = ("chunk", "split", "unbind", "unsqueeze")

CONSTANTS = (type(None), bool, int, float, str, torch.dtype)


@dataclass(frozen=True)
class Op:
    """A modulated norm, the dimensions of x and scale, and its options."""

    name: str
    ranks: tuple[int, int]
    options: tuple[tuple[str, Any], ...]


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


@dataclass(frozen=True)
class Shapes:
    """The forms of the arguments in a trace: x's, or one row for each sample, or one row."""

    samples: int
    tokens: int
    width: int
    columns: int
    forms: tuple[str, ...]

    def of(self, form: str) -> tuple[int, ...]:
        rows = {"tokens": (self.samples, self.tokens), "samples": (self.samples,), "one": ()}[form]
        return (*rows, self.width if form == "tokens" else self.columns)


@dataclass(frozen=True)
class Dtypes:
    """The dtypes of x and the norms' parameters, of the other arguments, and of what children
    return, None for that of what they are given."""

    x: torch.dtype
    rows: torch.dtype
    projected: torch.dtype | None = None


def found(module: nn.Module, norms: dict[str, int | None]) -> Program:
    """The program of a module, whose children `norms` are norms of these widths.

    Raises:
        NotAnOp: it modulates no norm, or does more; the text gives the reason.
    """
    refusals = []
    for shapes in _forms(module, norms):
        try:
            return _verified(module, norms, shapes)
        except NotAnOp as refusal:
            refusals.append(refusal)
    # The reason of a form in which the code runs says more.
    raise min(refusals, key=lambda one: isinstance(one, _Fails))


class _Fails(NotAnOp):
    """The code does not accept such arguments."""


def _forms(module: nn.Module, norms: dict[str, int | None]) -> Iterator[Shapes]:
    columns = next(child.in_features for child in module._modules.values() if _is_projection(child))
    width = next((width for width in norms.values() if width is not None), columns)
    count = len(inspect.signature(module.forward).parameters) - 1
    rows = ("samples",) * count
    for forms in (rows, *(rows[:i] + ("tokens",) + rows[i + 1 :] for i in range(count))):
        yield Shapes(2, 3, width, columns, ("tokens", *forms))
    yield Shapes(2, 3, width, columns, ("tokens", *("one",) * count))


def _is_projection(child: Any) -> bool:
    return all(
        isinstance(getattr(child, name, None), int) for name in ("in_features", "out_features")
    )


def _verified(module: nn.Module, norms: dict[str, int | None], shapes: Shapes) -> Program:
    """The program, which must be the same for other sizes, dtypes, modes and arguments."""
    half, bfloat, single = torch.float16, torch.bfloat16, torch.float32
    names = tuple(inspect.signature(module.forward).parameters)

    def traced(dtypes: Dtypes, of: Shapes = shapes, **options: Any) -> Program:
        return _Tracing(module, norms, of, dtypes, **options).program()

    program = traced(Dtypes(bfloat, bfloat))
    given = tuple(name for name in names if name in program.used)
    more = Shapes(4, 5, shapes.width, shapes.columns, shapes.forms)
    modes = tuple(op.options for op in program.ops)
    others = [
        traced(Dtypes(bfloat, bfloat), given=given, training=False),
        traced(Dtypes(half, half), more, given=given),
        traced(Dtypes(single, single), given=given, options=modes),
        # Casts show where x, the arguments and what children return differ.
        traced(Dtypes(single, half, bfloat), given=given, options=modes, casts="dropped"),
    ]
    # In float32 no norm shows whether it is one that autocast casts.
    others = [replace(other, is_cast=program.is_cast) for other in others]
    if any(other != program for other in others):
        raise NotAnOp("it computes something else for other sizes or dtypes, or in evaluation")
    with_casts = traced(Dtypes(single, half, bfloat), given=given, options=modes, casts="to x")
    return replace(with_casts, is_cast=program.is_cast)


class _Tracing:
    """One trace of a copy of a module, whose children are stand-ins, but for its norms."""

    def __init__(
        self, module: nn.Module, norms: dict[str, int | None], shapes: Shapes, dtypes: Dtypes,
        given: tuple[str, ...] | None = None, training: bool = True,
        options: tuple[Any, ...] | None = None, casts: str = "refused",
    ) -> None:  # fmt: skip
        self.module, self.shapes, self.dtypes = module, shapes, dtypes
        self.options, self.casts = options, casts
        self.trace = Trace()
        self.names = tuple(inspect.signature(module.forward).parameters)
        self.arguments = {
            name: self.trace.input(
                name, shapes.of(form), dtypes.x if form == "tokens" else dtypes.rows
            )
            for name, form in zip(self.names, shapes.forms, strict=True)
            if given is None or name in given
        }
        # What a placeholder of the trace is in the code.
        self.sources = {name: name for name in self.arguments}
        self.calls: dict[str, tuple[str, tuple[Any, ...], dict[str, Any]]] = {}
        self.asked: dict[int, fx.Node] = {}
        self.copy = object.__new__(type(module))
        children = {
            name: self._norm(name, child) if name in norms else self._stand_in(name, child)
            for name, child in module._modules.items()
        }
        vars(self.copy).update(vars(module), _modules=children)
        self.copy.training = training

    def _norm(self, name: str, child: Any) -> nn.Module:
        memo: dict[int, Any] = {}
        for own, parameter in child._parameters.items():
            if parameter is not None:
                key = f"{name}_{own}"
                memo[id(parameter)] = self.trace.input(key, tuple(parameter.shape), self.dtypes.x)
                self.sources[key] = f"getattr(self, {name!r}).{own}"
        try:
            return copy.deepcopy(child, memo)
        except Exception as error:
            raise NotAnOp(f"{name} cannot be copied: {first_line(error)}") from None

    def _stand_in(self, name: str, child: Any) -> Any:
        return None if child is None else _Child(name, child, self)

    def program(self) -> Program:
        before = own_attributes(self.copy)
        try:
            with self.trace.running():
                result = self.copy.forward(**self.arguments)
        except NotAnOp:
            raise
        except Exception as error:
            raise _Fails(f"it fails on fake tensors: {first_line(error)}") from None
        if list(map(id, before.values())) != list(map(id, own_attributes(self.copy).values())):
            raise NotAnOp("its forward changes its attributes")
        leaves, form = pytree.tree_flatten(result)
        if not isinstance(result, (Tensor, tuple)) or not all(
            isinstance(leaf, Tensor) for leaf in leaves
        ):
            raise NotAnOp("it does not return tensors")
        asked = [leaf for _, *given in self.calls.values() for leaf in pytree.tree_leaves(given)]
        tensors = [leaf for leaf in asked if isinstance(leaf, Tensor)]
        graph = self.trace.module((leaves, tensors))
        is_cast = self._rewritten(graph)
        (output,) = (node for node in graph.graph.nodes if node.op == "output")
        self.asked = dict(zip(map(id, tensors), output.args[0][1], strict=True))
        return self._written(graph.graph, form, len(leaves), is_cast)

    def _rewritten(self, graph: fx.GraphModule) -> bool:
        """Rewrite the norms, and say whether autocast casts the inputs of all or of none."""
        direct = sum(
            _is_norm(node) and value(node.args[0]).dtype is self.dtypes.x
            for node in graph.graph.nodes
        )
        rewrite(graph, NORM_OPS, strict=True)
        count = sum(_liger(node) in NORM_OPS for node in graph.graph.nodes)
        if direct not in (0, count):
            raise NotAnOp("autocast casts the inputs of some of its norms")
        report = rewrite(graph, MODULATED, strict=True)
        if not any(_liger(node) in MODULATED for node in graph.graph.nodes):
            reasons = [f"{one.op}: {one.reason}" for one in report.left]
            raise NotAnOp(reasons[0] if reasons else "it modulates no norm")
        return direct > 0

    def _written(self, graph: fx.Graph, form: Any, results: int, is_cast: bool) -> Program:
        (output,) = (node for node in graph.nodes if node.op == "output")
        names: dict[fx.Node, str] = {}
        lines: list[str] = []
        ops: list[Op] = []
        needed = _needed(output)
        for node in graph.nodes:
            if node is output:
                continue
            if node not in needed:
                call = canonical(node)
                if node.op != "placeholder" and (
                    call is None or call.op not in {*CHEAP, IDENTITY, "item", "unbind"}
                ):
                    raise NotAnOp(f"it does more than compute its results: {node.name}")
                if node.target not in self.calls:
                    continue
            text = self._text(node, names, ops)
            if text in names.values() or node.target in self.sources:
                names[node] = text
                continue
            names[node] = f"v{len(lines)}"
            lines.append(f"{names[node]} = {text}")
        values = [names[node] for node in output.args[0][0]]
        returned = pytree.tree_unflatten(values, form)
        if isinstance(returned, tuple) and not all(isinstance(one, str) for one in returned):
            raise NotAnOp("it returns tuples of tuples")
        text = returned if isinstance(returned, str) else f"({', '.join(returned)},)"
        used = tuple(name for name in self.names if name in {names.get(n) for n in needed})
        return Program(used, (*lines, f"return {text}"), tuple(ops), is_cast)

    def _text(self, node: fx.Node, names: dict[fx.Node, str], ops: list[Op]) -> str:
        """The expression of a node, of the names of others."""
        if node.op == "placeholder":
            if node.target in self.calls:
                name, args, kwargs = self.calls[node.target]
                # Nodes, where rewrites may have replaced those of the trace.
                nodes = pytree.tree_map(lambda one: self.asked.get(id(one), one), (args, kwargs))
                return f"getattr(self, {name!r})({_arguments(*nodes, names)})"
            if node.target not in self.sources:
                raise NotAnOp(f"it reads a tensor that is not among its arguments: {node.target}")
            return self.sources[node.target]
        if _liger(node) in MODULATED:
            return self._op(node, names, ops)
        cast = calls(node, "cast")
        if cast is not None:
            return self._cast(cast.args, names)
        name = operation(node)
        if name == "getitem":
            return f"{_name(node.args[0], names)}[{_index(node.args[1])}]"
        if name == "silu" or name in FUNCTIONS:
            return f"{name}({_arguments(node.args, node.kwargs, names)})"
        call = canonical(node)
        if call is not None and call.op == IDENTITY:
            return _name(call.args[0], names)
        raise NotAnOp(f"it computes {name or node.name} beside its norms and projections")

    def _cast(self, args: tuple[Any, ...], names: dict[fx.Node, str]) -> str:
        source, dtype = args
        if self.casts == "refused" or dtype is not self.dtypes.x:
            raise NotAnOp(f"it casts to {dtype} beside its norms")
        x = _name(source, names)
        return x if self.casts == "dropped" else f"{x}.to({self.names[0]}.dtype)"

    def _op(self, node: fx.Node, names: dict[fx.Node, str], ops: list[Op]) -> str:
        name = node.target._opname  # type: ignore[union-attr]
        bound = inspect.signature(OPS[name].definition).bind(*node.args, **node.kwargs)
        bound.apply_defaults()
        options = dict(bound.arguments)
        tensors = [
            options.pop(key) for key in ("x", "scale", "shift", "weight", "bias") if key in options
        ]
        ranks = (value(tensors[0]).dim(), value(tensors[1]).dim())
        given = tuple(options.items())
        if self.options is not None and len(ops) < len(self.options):
            # In float32 the casting modes are equal.
            known = dict(self.options[len(ops)])
            given = tuple((key, known[key] if key == "casting_mode" else one) for key, one in given)
        ops.append(Op(name, ranks, given))
        texts = ("None" if one is None else _name(one, names) for one in tensors)
        return f"modulate({len(ops) - 1}, {', '.join(texts)})"


class _Child(nn.Module):
    """Stand-in for a child: returns a tensor without data, and records its arguments."""

    def __init__(self, name: str, child: nn.Module, tracing: _Tracing) -> None:
        super().__init__()
        self.name, self.of = name, tracing
        self.columns = getattr(child, "out_features", None)
        self.has_state = next(child.parameters(), None) is not None

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        tensors = [one for one in pytree.tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        if not tensors:
            raise NotAnOp(f"{self.name} is given no tensor")
        shape = tuple(tensors[0].shape)
        if self.has_state:
            columns = self.of.shapes.columns if self.columns is None else self.columns
            shape = (*shape[:-1], columns)
        dtype = self.of.dtypes.projected if self.has_state else None
        key = f"call_{len(self.of.calls)}"
        self.of.calls[key] = (self.name, args, kwargs)
        return self.of.trace.input(key, shape, dtype or tensors[0].dtype)


def _is_norm(node: fx.Node) -> bool:
    return operation(node) in NORM_OPS or _liger(node) in NORM_OPS


def _liger(node: fx.Node) -> str | None:
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


def _name(node: Any, names: dict[fx.Node, str]) -> str:
    if not isinstance(node, fx.Node) or node not in names:
        raise NotAnOp(f"it computes {node} in a way that is not known")
    return names[node]


def _arguments(args: Any, kwargs: Any, names: dict[fx.Node, str]) -> str:
    def text(one: Any) -> str:
        if isinstance(one, fx.Node):
            return _name(one, names)
        if not isinstance(one, CONSTANTS):
            raise NotAnOp(f"it passes on a {type(one).__name__}")
        return repr(one)

    texts = (text(one) for one in args)
    return ", ".join([*texts, *(f"{name}={text(one)}" for name, one in kwargs.items())])


def _index(index: Any) -> str:
    parts = index if isinstance(index, tuple) else (index,)
    if not all(part is None or part == slice(None) or type(part) is int for part in parts):
        raise NotAnOp(f"it takes the item {index}")
    return ", ".join(":" if isinstance(part, slice) else repr(part) for part in parts)
