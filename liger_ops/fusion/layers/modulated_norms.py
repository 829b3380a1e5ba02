"""Modules that modulate a norm, such as AdaLN of diffusers: their forward calls one op for both.

Such a module projects an embedding, takes scale and shift from the projection, modulates the norm
of its input, and returns the result, often with other chunks of the projection. The new forward
calls the op, and the same children except for the norms.
"""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from ... import library
from ...rewrites import rewrite
from ...rewrites.engine.canonical import value
from ...rewrites.engine.canonical.call import operation
from ...rewrites.engine.report import Report, bound, op_of
from .. import classes
from ..probing import NotAnOp
from ..trace import ANY_SIZES
from .installed import ModuleFacts, OpCaller
from .kind import (
    FLOATS,
    Kind,
    argument_obstacle,
    has_state,
    obstacle,
    parameter_obstacle,
    state_obstacle,
    width_of,
)
from .module_trace import Case, Traced, names_of
from .program import Program, ProgramStep

NORM_OPS = ("layer_norm", "rms_norm")

# Names of classes that a reader expects in the report.
NAME = re.compile(r"Ada(ptive)?(Layer|RMS|Rms)?Norm|NormZero|NormContinuous")

# No module that computes one or two modulated norms and nothing else has more children.
MOST_CHILDREN = 6
# No module splits its projection into more parts.
MOST_CHUNKS = 12


@dataclass(frozen=True)
class _ModulationForm:
    """The width of the norm, the columns of the embedding, and the form of each argument.

    An argument has the rows of x ("tokens"), a row for each sample ("samples"), or one row ("one").
    """

    width: int
    columns: int
    forms: tuple[str, ...]

    def shape(self, form: str, rows: tuple[int, int]) -> tuple[int, ...]:
        samples, tokens = (ANY_SIZES[n] for n in rows)
        leading = {"tokens": (samples, tokens), "samples": (samples,), "one": ()}[form]
        return (*leading, self.width if form == "tokens" else self.columns)


class ModulatedNorms(Kind):
    """Modules that modulate norms by a projection, the same in all sizes, dtypes and modes."""

    name = title = "modulated norm"
    rewrites = ops = ("modulated_layer_norm", "modulated_rms_norm")
    functions = ("chunk", "silu", "split", "unbind", "unsqueeze")
    casts = True
    returns = tuple

    def __init__(self, model: nn.Module, width_of: Callable[[nn.Module], int | None]) -> None:
        """`width_of` returns the width of a norm (None for any), and raises NotAnOp for another
        module."""
        super().__init__(model)
        self.width_of = width_of
        self.known: dict[nn.Module, dict[str, int | None]] = {}

    def is_expected(self, name: str, module: nn.Module) -> bool:
        return bool(NAME.search(classes.class_of(module).__name__) and module._modules)

    def obstacle(self, module: nn.Module) -> str | None:
        children = [child for child in module._modules.values() if child is not None]
        count = sum(map(_is_projection, children))
        if not 2 <= len(children) <= MOST_CHILDREN or not 1 <= count <= 2:
            return f"it has {len(children)} children, and {count} that may be projections"
        reason = obstacle(module) or state_obstacle(module)
        if reason := reason or argument_obstacle(module, _takes_two_arguments):
            return reason
        for name in self.norms(module):
            if reason := parameter_obstacle(module.get_submodule(name), f"{name}."):
                return reason
        return None

    def norms(self, module: nn.Module) -> dict[str, int | None]:
        """Return the names and widths of the children that are norms."""
        if module in self.known:
            return self.known[module]
        norms: dict[str, int | None] = {}
        reasons = {}
        for name, child in module._modules.items():
            if child is None or _is_projection(child):
                continue
            try:
                norms[name] = self.width_of(child)
            except NotAnOp as reason:
                reasons[name] = f"it has no norm that is an op; {name}: {reason}"
        if not norms:
            # The name of a child has no other effect than to choose the reason.
            named = (reason for name, reason in reasons.items() if "norm" in name)
            raise NotAnOp(next(named, "it has no norm"))
        return self.known.setdefault(module, norms)

    def called_children(self, module: nn.Module) -> Collection[str]:
        norms = self.norms(module)
        return [
            name
            for name, child in module._modules.items()
            if child is not None and name not in norms
        ]

    def forms(self, module: nn.Module) -> Iterator[_ModulationForm]:
        count = len(names_of(module.forward)) - 1
        rows = ("samples",) * count
        one_of_tokens = (rows[:i] + ("tokens",) + rows[i + 1 :] for i in range(count))
        every = (rows, *one_of_tokens, ("one",) * count)
        projection: Any = next(filter(_is_projection, module._modules.values()))
        for width in _widths(projection, self.norms(module)):
            for forms in every:
                yield _ModulationForm(width, projection.in_features, ("tokens", *forms))

    def cases(self, module: nn.Module, form: _ModulationForm) -> Iterator[Case]:
        forms = dict(zip(names_of(module.forward), form.forms, strict=True))
        columns = {}
        for name in self.called_children(module):
            child = module.get_submodule(name)
            width = width_of(child)
            if width is not None or has_state(child):
                columns[name] = form.columns if width is None else width

        def case(
            dtype: torch.dtype, of_rows: torch.dtype, results: torch.dtype | None = None,
            training: bool = True, sizes: tuple[int, int] = (2, 3),
        ) -> Case:  # fmt: skip
            shapes = {name: form.shape(kind, sizes) for name, kind in forms.items()}
            dtypes = {name: dtype if kind == "tokens" else of_rows for name, kind in forms.items()}
            return Case(shapes, dtypes, dtype, columns, results, training)

        half, bfloat, single = torch.float16, torch.bfloat16, torch.float32
        yield case(bfloat, bfloat)
        yield case(bfloat, bfloat, training=False)
        yield case(half, half, sizes=(4, 5))
        yield case(single, single)
        # Three dtypes, for x, the arguments and the results of children, show every cast.
        yield case(single, half, bfloat)

    def rewrite_graph(self, traced: Traced, names: Collection[str]) -> Report:
        nodes = traced.graph.graph.nodes
        given = [value(node.args[0]).dtype for node in nodes if _is_norm(node)]
        direct = given.count(traced.case.dtype)
        rewrite(traced.graph, NORM_OPS, strict=True)
        if direct not in (0, sum(op_of(node) in NORM_OPS for node in nodes)):
            raise NotAnOp("autocast casts the inputs of some of its norms")
        traced.graph.meta["is_cast"] = direct > 0
        return super().rewrite_graph(traced, names)

    def details_of(
        self, module: nn.Module, form: _ModulationForm, traced: Traced, program: Program
    ) -> tuple[bool, Any]:
        """Return whether autocast casts the inputs of the norms, and the dimensions of x and scale
        of each modulation."""
        ops = (given for _, given in bound(traced.graph.graph.nodes))
        ranks = tuple((value(one["x"]).dim(), value(one["scale"]).dim()) for one in ops)
        return traced.graph.meta["is_cast"], ranks

    @staticmethod
    def caller(facts: ModuleFacts, op: ProgramStep, i: int) -> OpCaller:
        overload, (is_cast, ranks) = library.OPS[op.name].overload, facts.details

        def modulated(x: Tensor, scale: Tensor, shift: Tensor | None, *rest: Any) -> Tensor | None:
            if not _computes_the_same(ranks[i], is_cast, x, scale, shift, rest):
                return None
            device = x.device.type
            # Autocast changes nothing in code that casts before its norms, and the op's autocast
            # rule would.
            is_off = not is_cast and torch.is_autocast_enabled(device)
            off = torch.autocast(device, enabled=False) if is_off else contextlib.nullcontext()
            with off:
                return overload(x, scale, shift, *rest)

        return modulated


def _takes_two_arguments(parameters: list[inspect.Parameter]) -> bool:
    return len(parameters) > 1 and all(
        parameter.kind is parameter.POSITIONAL_OR_KEYWORD for parameter in parameters
    )


def _is_projection(child: Any) -> bool:
    """Return whether a child has attributes for the widths of its inputs and outputs, as linear
    layers do."""
    return width_of(child, "in_features") is not None and width_of(child) is not None


def _widths(projection: Any, norms: dict[str, int | None]) -> list[int]:
    """Return the norms' width, or for norms that take any width those of equal parts of the
    projection."""
    known_widths = [width for width in norms.values() if width is not None]
    columns = projection.out_features
    return known_widths[:1] or [columns // i for i in range(1, MOST_CHUNKS + 1) if columns % i == 0]


def _is_norm(node: fx.Node) -> bool:
    return operation(node) in NORM_OPS or op_of(node) in NORM_OPS


def _computes_the_same(
    ranks: tuple[int, int], is_cast: bool, x: Tensor, scale: Tensor, shift: Tensor | None,
    rest: tuple[Any, ...],
) -> bool:  # fmt: skip
    """Return whether the op computes what the code does in a call: the traced dimensions, rows of
    scale that the op takes as PyTorch broadcasts them, and a result of x's dtype."""
    if (x.dim(), scale.dim()) != ranks or not _has_rows_of(x, scale):
        return False
    if shift is not None and shift.shape != scale.shape:
        return False
    rows = [scale] if shift is None else [scale, shift]
    others = [tensor for tensor in rest if isinstance(tensor, Tensor)]
    if any(tensor.dtype not in FLOATS for tensor in (x, *rows, *others)):
        return False
    device = x.device.type
    if is_cast and device in library.AUTOCAST_KEYS and torch.is_autocast_enabled(device):
        return True
    return all(tensor.dtype is x.dtype for tensor in others) and all(
        torch.promote_types(x.dtype, tensor.dtype) is x.dtype for tensor in rows
    )


def _has_rows_of(x: Tensor, scale: Tensor) -> bool:
    """Return whether scale has one row for all of x, or for each sample, or for each token."""
    rows = scale.shape[:-1]
    if scale.shape[-1] != x.shape[-1]:
        return False
    if all(size == 1 for size in rows[1:]):
        return not rows or rows[0] in (1, x.shape[0])
    return rows == x.shape[:-1]
