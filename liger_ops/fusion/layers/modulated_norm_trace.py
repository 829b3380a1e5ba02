"""Trace a module that modulates norms, in the cases that show what it computes.

The module's code runs on tensors without data, and the backend's rewrites find the ops in its
graph. Children are stand-ins, but for the norms.
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

from ...rewrites import rewrite
from ...rewrites.engine.canonical import value
from ...rewrites.engine.canonical.call import operation
from ..assumptions import Assumptions, Reads
from ..probing import NotAnOp, first_line, own_attributes
from ..trace import ANY_SIZES, Trace
from .modulated_norm_code import MODULATED, ChildCall, Code, Program, op_of

NORM_OPS = ("layer_norm", "rms_norm")
# More parts of a projection than any module has.
MOST_CHUNKS = 12


@dataclass(frozen=True)
class Shapes:
    """The forms of the arguments in a trace: x's, or one row for each sample, or one row."""

    samples: int
    tokens: int
    width: int
    columns: int
    forms: tuple[str, ...]

    def of(self, form: str) -> tuple[int, ...]:
        samples, tokens = ANY_SIZES[self.samples], ANY_SIZES[self.tokens]
        rows = {"tokens": (samples, tokens), "samples": (samples,), "one": ()}[form]
        return (*rows, self.width if form == "tokens" else self.columns)


@dataclass(frozen=True)
class Dtypes:
    """The dtypes of x and the norms' parameters, of the other arguments, and of what children
    return, None for that of what they are given."""

    x: torch.dtype
    rows: torch.dtype
    projected: torch.dtype | None = None


def found(module: nn.Module, norms: dict[str, int | None]) -> tuple[Program, Assumptions]:
    """The program of a module, whose children `norms` are norms of these widths, and what that
    assumes of the module.

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
    count = len(inspect.signature(module.forward).parameters) - 1
    rows = ("samples",) * count
    one = ("one",) * count
    projection: Any = next(filter(is_projection, module._modules.values()))
    for width in _widths(projection, norms):
        for forms in (rows, *(rows[:i] + ("tokens",) + rows[i + 1 :] for i in range(count)), one):
            yield Shapes(2, 3, width, projection.in_features, ("tokens", *forms))


def _widths(projection: Any, norms: dict[str, int | None]) -> list[int]:
    """The norms' width, or possible widths of norms that take any: parts of the projection."""
    known = [width for width in norms.values() if width is not None]
    columns = projection.out_features
    return known[:1] or [columns // i for i in range(1, MOST_CHUNKS + 1) if columns % i == 0]


def is_projection(child: Any) -> bool:
    """Whether a child says how wide its inputs and outputs are, as linear layers do."""
    return all(
        isinstance(getattr(child, name, None), int) for name in ("in_features", "out_features")
    )


def _verified(
    module: nn.Module, norms: dict[str, int | None], shapes: Shapes
) -> tuple[Program, Assumptions]:
    """The program, which must be the same for other sizes, dtypes, modes and arguments."""
    half, bfloat, single = torch.float16, torch.bfloat16, torch.float32
    names = tuple(inspect.signature(module.forward).parameters)
    reads = Reads(module._modules.keys() - norms.keys())

    def traced(dtypes: Dtypes, of: Shapes = shapes, **options: Any) -> Program:
        return _Tracing(module, norms, of, dtypes, **options).program(reads)

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
    assumptions = reads.assumptions(module, (half, bfloat, single))
    return replace(with_casts, is_cast=program.is_cast), assumptions


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
        self.calls: dict[str, ChildCall] = {}
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

    def program(self, reads: Reads) -> Program:
        before = own_attributes(self.copy)
        try:
            with reads.of(self.copy), self.trace.running():
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
        # The rewrites may have replaced nodes of the trace.
        (output,) = (node for node in graph.graph.nodes if node.op == "output")
        nodes = dict(zip(map(id, tensors), output.args[0][1], strict=True))
        calls = pytree.tree_map(lambda one: nodes.get(id(one), one), self.calls)
        code = Code(self.sources, calls, self.names, self.dtypes.x, self.casts, self.options)
        return code.program(graph.graph, form, is_cast)

    def _rewritten(self, graph: fx.GraphModule) -> bool:
        """Rewrite the norms, and say whether autocast casts the inputs of all or of none."""
        direct = sum(
            _is_norm(node) and value(node.args[0]).dtype is self.dtypes.x
            for node in graph.graph.nodes
        )
        rewrite(graph, NORM_OPS, strict=True)
        count = sum(op_of(node) in NORM_OPS for node in graph.graph.nodes)
        if direct not in (0, count):
            raise NotAnOp("autocast casts the inputs of some of its norms")
        report = rewrite(graph, MODULATED, strict=True)
        if not any(op_of(node) in MODULATED for node in graph.graph.nodes):
            reasons = [f"{one.op}: {one.reason}" for one in report.left]
            raise NotAnOp(reasons[0] if reasons else "it modulates no norm")
        return direct > 0


class _Child(nn.Module):
    """Stand-in for a child: returns a tensor without data, and records its arguments."""

    def __init__(self, name: str, child: nn.Module, tracing: _Tracing) -> None:
        super().__init__()
        self.name, self.of = name, tracing
        self.columns = getattr(child, "out_features", None)
        has_state = (True for _ in (*child.parameters(), *child.buffers()))
        self.is_projection = self.columns is not None or next(has_state, False)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        tensors = [one for one in pytree.tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        if not tensors:
            raise NotAnOp(f"{self.name} is given no tensor")
        shape = tuple(tensors[0].shape)
        if self.is_projection:
            columns = self.of.shapes.columns if self.columns is None else self.columns
            shape = (*shape[:-1], columns)
        dtype = self.of.dtypes.projected if self.is_projection else None
        key = f"call_{len(self.of.calls)}"
        self.of.calls[key] = (self.name, args, kwargs)
        return self.of.trace.input(key, shape, dtype or tensors[0].dtype)


def _is_norm(node: fx.Node) -> bool:
    return operation(node) in NORM_OPS or op_of(node) in NORM_OPS
