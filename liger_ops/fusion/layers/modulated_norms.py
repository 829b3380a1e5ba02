"""Norms that their module modulates, as AdaLN of diffusers: its forward calls the op.

The module projects an embedding, takes scale and shift from the projection, modulates the norm of
its input, and returns that, often with other chunks of the projection. The new forward calls the
same children, but for the norms, and the op.
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
from ...rewrites.engine.recognise import bound, op_of
from ...rewrites.engine.report import Report
from .. import classes
from ..probing import NotAnOp
from ..trace import ANY_SIZES
from .installed import Called, Facts
from .kind import (
    Kind,
    argument_obstacle,
    has_state,
    obstacle,
    parameter_obstacle,
    state_obstacle,
    width_of,
)
from .module_trace import Case, Traced, names_of
from .program import Program, Step

NORM_OPS = ("layer_norm", "rms_norm")

# Names of modules that a reader expects in the report.
NAME = re.compile(r"Ada(ptive)?(Layer|RMS|Rms)?Norm|NormZero|NormContinuous")

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
# More children than in any module that computes one or two modulated norms and nothing else.
MOST_CHILDREN = 6
# More parts of a projection than any module has.
MOST_CHUNKS = 12


@dataclass(frozen=True)
class _Form:
    """The forms of the arguments: x's, or one row for each sample, or one row."""

    width: int
    columns: int
    forms: tuple[str, ...]

    def shape(self, form: str, rows: tuple[int, int]) -> tuple[int, ...]:
        samples, tokens = (ANY_SIZES[n] for n in rows)
        leading = {"tokens": (samples, tokens), "samples": (samples,), "one": ()}[form]
        return (*leading, self.width if form == "tokens" else self.columns)


class ModulatedNorms(Kind):
    """It is the same for other sizes, dtypes and modes."""

    name = title = "modulated norm"
    rewrites = ops = ("modulated_layer_norm", "modulated_rms_norm")
    functions = ("chunk", "silu", "split", "unbind", "unsqueeze")
    casts = True
    returns = tuple

    def __init__(self, model: nn.Module, width_of: Callable[[nn.Module], int | None]) -> None:
        """`width_of` is the width of a norm, None for any, and raises NotAnOp for others."""
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
        if reason := reason or argument_obstacle(module, _are_two):
            return reason
        for name in self.norms(module):
            if reason := parameter_obstacle(module.get_submodule(name), f"{name}."):
                return reason
        return None

    def norms(self, module: nn.Module) -> dict[str, int | None]:
        """The names and widths of the children that are norms."""
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
            # Names only choose the reason.
            named = (reason for name, reason in reasons.items() if "norm" in name)
            raise NotAnOp(next(named, "it has no norm"))
        return self.known.setdefault(module, norms)

    def called(self, module: nn.Module) -> Collection[str]:
        norms = self.norms(module)
        return [
            name
            for name, child in module._modules.items()
            if child is not None and name not in norms
        ]

    def forms(self, module: nn.Module) -> Iterator[_Form]:
        count = len(names_of(module.forward)) - 1
        rows = ("samples",) * count
        one_of_tokens = (rows[:i] + ("tokens",) + rows[i + 1 :] for i in range(count))
        every = (rows, *one_of_tokens, ("one",) * count)
        projection: Any = next(filter(_is_projection, module._modules.values()))
        for width in _widths(projection, self.norms(module)):
            for forms in every:
                yield _Form(width, projection.in_features, ("tokens", *forms))

    def cases(self, module: nn.Module, form: _Form) -> Iterator[Case]:
        forms = dict(zip(names_of(module.forward), form.forms, strict=True))
        columns = {}
        for name in self.called(module):
            child = module.get_submodule(name)
            width = width_of(child)
            if width is not None or has_state(child):
                columns[name] = form.columns if width is None else width

        def case(
            dtype: torch.dtype, of_rows: torch.dtype, results: torch.dtype | None = None,
            training: bool = True, sizes: tuple[int, int] = (2, 3),
        ) -> Case:  # fmt: skip
            shapes = {name: form.shape(one, sizes) for name, one in forms.items()}
            dtypes = {name: dtype if one == "tokens" else of_rows for name, one in forms.items()}
            return Case(shapes, dtypes, dtype, columns, results, training)

        half, bfloat, single = torch.float16, torch.bfloat16, torch.float32
        yield case(bfloat, bfloat)
        yield case(bfloat, bfloat, training=False)
        yield case(half, half, sizes=(4, 5))
        yield case(single, single)
        # Casts show where x, the arguments and what children return differ.
        yield case(single, half, bfloat)

    def rewritten(self, traced: Traced, names: Collection[str]) -> Report:
        nodes = traced.graph.graph.nodes
        given = [value(node.args[0]).dtype for node in nodes if _is_norm(node)]
        direct = given.count(traced.case.dtype)
        rewrite(traced.graph, NORM_OPS, strict=True)
        if direct not in (0, sum(op_of(node) in NORM_OPS for node in nodes)):
            raise NotAnOp("autocast casts the inputs of some of its norms")
        traced.graph.meta["is_cast"] = direct > 0
        return super().rewritten(traced, names)

    def form_of(
        self, module: nn.Module, form: _Form, traced: Traced, program: Program
    ) -> tuple[bool, Any]:
        """Whether autocast casts the inputs of its norms, else they have their inputs' dtypes, and
        the dimensions of x and scale of each modulation."""
        ops = (given for _, given in bound(traced.graph.graph.nodes))
        ranks = tuple((value(one["x"]).dim(), value(one["scale"]).dim()) for one in ops)
        return traced.graph.meta["is_cast"], ranks

    @staticmethod
    def caller(facts: Facts, op: Step, i: int) -> Called:
        overload, (is_cast, ranks) = library.OPS[op.name].overload, facts.form

        def modulated(x: Tensor, scale: Tensor, shift: Tensor | None, *rest: Any) -> Tensor | None:
            if not _is_usual(ranks[i], is_cast, x, scale, shift, rest):
                return None
            device = x.device.type
            is_off = not is_cast and torch.is_autocast_enabled(device)
            off = torch.autocast(device, enabled=False) if is_off else contextlib.nullcontext()
            with off:
                return overload(x, scale, shift, *rest)

        return modulated


def _are_two(given: list[inspect.Parameter]) -> bool:
    return len(given) > 1 and all(one.kind is one.POSITIONAL_OR_KEYWORD for one in given)


def _is_projection(child: Any) -> bool:
    """Whether a child says how wide its inputs and outputs are, as linear layers do."""
    return width_of(child, "in_features") is not None and width_of(child) is not None


def _widths(projection: Any, norms: dict[str, int | None]) -> list[int]:
    """The norms' width, or possible widths of norms that take any: parts of the projection."""
    known = [width for width in norms.values() if width is not None]
    columns = projection.out_features
    return known[:1] or [columns // i for i in range(1, MOST_CHUNKS + 1) if columns % i == 0]


def _is_norm(node: fx.Node) -> bool:
    return operation(node) in NORM_OPS or op_of(node) in NORM_OPS


def _is_usual(
    ranks: tuple[int, int], is_cast: bool, x: Tensor, scale: Tensor, shift: Tensor | None,
    rest: tuple[Any, ...],
) -> bool:  # fmt: skip
    """Whether the op computes what the code does: the traced dimensions, rows of scale that the op
    takes as PyTorch broadcasts them, and a result of x's dtype."""
    if (x.dim(), scale.dim()) != ranks or not _has_rows_of(x, scale):
        return False
    if shift is not None and shift.shape != scale.shape:
        return False
    rows = [scale] if shift is None else [scale, shift]
    given = [one for one in rest if isinstance(one, Tensor)]
    if any(one.dtype not in FLOATS for one in (x, *rows, *given)):
        return False
    device = x.device.type
    if is_cast and device in library.AUTOCAST_KEYS and torch.is_autocast_enabled(device):
        return True
    return all(one.dtype is x.dtype for one in given) and all(
        torch.promote_types(x.dtype, one.dtype) is x.dtype for one in rows
    )


def _has_rows_of(x: Tensor, scale: Tensor) -> bool:
    """Whether scale has one row for all of x, or for each sample, or for each token."""
    rows = scale.shape[:-1]
    if scale.shape[-1] != x.shape[-1]:
        return False
    if all(size == 1 for size in rows[1:]):
        return not rows or rows[0] in (1, x.shape[0])
    return rows == x.shape[:-1]
