"""Rotary embeddings: the function of queries, keys and tables that a forward calls becomes rope.

In transformers this is a global function of the model's file, which every attention in it calls.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import operator
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from ...rewrites.engine.canonical import IDENTITY, canonical, value
from ...rewrites.engine.graph_state import erase_unused, needed_by
from ...rewrites.engine.insertion import derive
from ...rewrites.engine.report import Report, bound
from .. import classes
from ..planning import FusionPlan
from ..probing import NotAnOp, dtype_name, own_attributes
from ..trace import ANY_SIZES
from .functions import ForwardHolder, Functions, globals_of
from .installed import ModuleFacts, argument_arranger, program_runner
from .module_trace import Case, FailsInTrace, ModuleTrace, Traced, names_of
from .program import Program, is_dropped_cast

ROTARY_NAME = re.compile(r"apply_(\w+_)?(rotary|rope)")

# Optional parameters with a known meaning. Any other has to be None.
UNSQUEEZE_DIM = "unsqueeze_dim"
SECTIONS = "mrope_section"

# Queries have the dimensions batch, heads, sequence and width.
LAYOUTS = ("bhsd", "bshd", "shd")
# Widths of tables: a head's (d), half of it (e), or that of a rotated part of the head (r).
WIDTHS = ("d", "e", "r")

# Pairs of dtypes, of queries and tables, in which a form is tried. Under autocast, tables may be
# wider than queries.
FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
WIDER = ((torch.bfloat16, torch.float32), (torch.float16, torch.float32))
DTYPES = (*zip(FLOATS, FLOATS, strict=True), *WIDER)
OF_COMPLEX = tuple((dtype, torch.complex64) for dtype in FLOATS)
# Casts to these dtypes around the op are dropped: it computes in float32 and rounds once.
WIDE = (torch.float64, torch.complex64, torch.float32)

# Views of a table that keep the order of its elements, if they keep the sizes other than 1.
VIEWS = {IDENTITY, "contiguous", "squeeze", "transpose", "unsqueeze", "view"}


@dataclass(frozen=True)
class RotaryForm:
    """A form of call of a rotary function.

    Attributes:
        shapes: the shape of queries, keys and each table, as a letter per dimension: batch b,
            sequence s, heads h of queries and g of keys, width d. Sizes of the same letter are
            equal; c is b or 1, e is half of d, and r any other even number below d.
        others: the other arguments, with SECTIONS for any sections.
    """

    shapes: tuple[str, ...]
    others: tuple[Any, ...]

    def fits(self, given: tuple[Any, ...], dtypes: Collection[Any]) -> bool:
        """Return whether arguments have this form, in one of the pairs `dtypes` of dtypes of
        queries and tables."""
        count = len(self.shapes)
        for x, shape in zip(given, self.shapes, strict=False):
            if not isinstance(x, Tensor) or x.dim() != len(shape):
                return False
        for wanted, argument in zip(self.others, given[count:], strict=True):
            if argument is None if wanted == SECTIONS else argument != wanted:
                return False
        q, k, cos, sin = given[0], given[1], given[2], given[count - 1]
        if (q.dtype, cos.dtype) not in dtypes or k.dtype != q.dtype or sin.dtype != cos.dtype:
            return False
        if cos.shape != sin.shape:
            return False
        sizes = {"1": 1, "3": 3}
        for x, shape in zip((q, k, cos), self.shapes, strict=False):
            for name, size in zip(shape, x.shape, strict=True):
                if sizes.setdefault(name, size) != size:
                    return False
        D, half, part = sizes["d"], sizes.get("e"), sizes.get("r")
        if half is not None and 2 * half != D:
            return False
        if part is not None and (part >= D or part % 2 or 2 * part == D):
            return False
        return "c" not in sizes or sizes["c"] == 1 or sizes["c"] == sizes["b"]


class Rotary(Functions):
    """Rotary functions. The first form of call that is rope is compared in all dtypes, and further
    forms in bfloat16 alone."""

    name = title = "rotary embedding"
    rewrites = ops = ("rope",)
    functions = ("chunk", "contiguous", "neg", "squeeze", "transpose", "unsqueeze")
    returns = tuple

    def look(self, plan: FusionPlan, name: str, module: nn.Module) -> None:
        if not self.is_fused(name, module):
            for reason in _not_called_as_rope(module):
                plan.leave(name, module, reason)
            super().look(plan, name, module)

    def named(self, cls: Any) -> Iterator[tuple[str, Any]]:
        for name, function in globals_of(getattr(cls, "forward", None)):
            if parameters_of(function):
                yield name, function

    def recognise(self, function: Any) -> tuple[ModuleFacts, ...]:
        """Return what replaces the calls of each form that is rope."""
        module = ForwardHolder(function)
        trace = ModuleTrace(module, (), self.method)
        is_complex = tables_of(trace.arguments) == 1
        forms = _forms(function, trace.arguments)
        found = self.facts_of_forms(module, trace, forms, OF_COMPLEX if is_complex else DTYPES)
        if not is_complex and WIDER[0] not in found[0].assumptions.dtypes:
            with contextlib.suppress(NotAnOp):
                found += self.facts_of_forms(module, trace, [one.details for one in found], WIDER)
        return tuple(found)

    def facts_of_forms(
        self,
        module: nn.Module,
        trace: ModuleTrace,
        forms: Iterable[RotaryForm],
        dtypes: Sequence[Any],
    ) -> list[ModuleFacts]:
        """Return what replaces the calls of each form that is rope, in the first form's dtypes.

        Raises:
            NotAnOp: no form is rope; the text gives the reason.
        """
        found: list[ModuleFacts] = []
        reasons: list[NotAnOp] = []
        for form in forms:
            try:
                facts = self.verify_form(module, trace, (form, dtypes[: 1 if found else None]))
            except FailsInTrace:
                # The function does not accept such a call.
                continue
            except NotAnOp as reason:
                reasons.append(reason)
            else:
                found.append(replace(facts, assumptions=(found or [facts])[0].assumptions))
        if not found:
            raise next(iter(reasons), NotAnOp("it computes no rope"))
        return found

    def cases(self, module: nn.Module, form: tuple[RotaryForm, Sequence[Any]]) -> Iterator[Case]:
        known, pairs = form
        names = names_of(module.forward)
        for dtype, of_tables in pairs:
            d, rows = (12, (2, 5)) if dtype is torch.bfloat16 else (20, (3, 4))
            b, s = (ANY_SIZES[n] for n in rows)
            # All sizes differ, so that a dimension of a table can only be one of the queries'.
            sizes = {"h": 6, "g": 3, "1": 1, "3": 3, "b": b, "c": b, "s": s}
            sizes |= {"d": d, "e": d // 2, "r": 8}
            shapes = [tuple([sizes[one] for one in shape]) for shape in known.shapes]
            others = [[1, 3, d // 2 - 4] if one == SECTIONS else one for one in known.others]
            yield Case(
                dict(zip(names, shapes, strict=False)),
                dict(zip(names, (dtype, dtype, of_tables, of_tables), strict=False)),
                of_tables,
                constants=dict(zip(names[len(shapes) :], others, strict=True)),
                # In these dtypes the function may be another one; its own code then runs.
                tolerates=NotAnOp if dtype is torch.float64 or (dtype, of_tables) in WIDER else (),
            )

    def check(self, traced: Traced) -> None:
        case = traced.case
        shapes = [tuple(y.shape) for y in traced.result]
        if shapes != list(case.shapes.values())[:2]:
            raise FailsInTrace(f"it returns the shapes {shapes}, not those of queries and keys")
        if {y.dtype for y in traced.result} not in ({case.dtype}, {case.parameters}):
            raise NotAnOp(f"it returns another dtype than {dtype_name(case.dtype)}")

    def casts_of(self, traced: Traced) -> tuple[Collection[torch.dtype], Mapping[torch.dtype, int]]:
        case = traced.case
        if traced.result[0].dtype is not case.dtype:
            # The function returns the tables' wider dtype: the op is given queries and keys in it.
            return WIDE[:2], {case.parameters: 2}
        return (case.dtype, case.parameters, *WIDE), {}

    def rewrite_graph(self, traced: Traced, names: Collection[str]) -> Report:
        report = super().rewrite_graph(traced, names)
        dropped, _ = self.casts_of(traced)
        sections = traced.case.constants.get(SECTIONS)
        nodes = {node.target: node for node in traced.graph.graph.nodes}
        for node, given in bound(traced.graph.graph.nodes):
            tables = {one: given[one] for one in ("cos", "sin") if given[one] is not None}
            of_input = traced.case.dtype
            given |= {
                one: _view_of_argument(node, x, dropped, of_input) for one, x in tables.items()
            }
            if sections is not None and given["sections"] == sections:
                given["sections"] = nodes[SECTIONS]
            node.args, node.kwargs = tuple(given.values()), {}
            for table in tables.values():
                erase_unused(table, needed_by(table))
        return report

    def details_of(
        self,
        module: nn.Module,
        form: tuple[RotaryForm, Sequence[Any]],
        traced: Traced,
        program: Program,
    ) -> RotaryForm:
        return form[0]

    def report_options(self, facts: tuple[ModuleFacts, ...]) -> dict[str, Any]:
        op = facts[0].program.ops[0]
        options = {} if op.args[3] is None else op.options()
        return {name: one for name, one in options.items() if name == "interleaved" or one is True}

    @classmethod
    def make_caller(cls, function: Any, facts: tuple[ModuleFacts, ...]) -> Callable[..., Any]:
        names = facts[0].program.arguments
        arranged = argument_arranger(function, names)
        runs = [
            (one.details, one.assumptions.dtypes, program_runner(one, cls.caller)) for one in facts
        ]

        def rotated(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            given = arranged(args, kwargs) if kwargs or len(args) != len(names) else args
            if given is not None:
                for form, dtypes, run in runs:
                    if form.fits(given, dtypes):
                        return run(None, given)
            return None

        return rotated


def _view_of_argument(
    at: fx.Node, table: Any, dropped: Collection[torch.dtype], of_input: torch.dtype
) -> Any:
    """Return a table as views of the function's argument without sizes in them, so that they hold
    for any size; or the table's own node, if it is computed in another way."""
    node, is_half, is_negative = table, False, False
    while (call := canonical(node)) is not None:
        if call.op == "neg":
            is_negative = not is_negative
        elif call.op == "slice" and not is_half:
            if call.args[1:] != (-1, 0, value(call.args[0]).shape[-1] // 2, 1):
                return table
            is_half = True
        elif call.op == "cast":
            source, dtype = call.args
            if dtype not in dropped or not is_dropped_cast(source, dtype, of_input):
                return table
        elif call.op not in VIEWS or _sizes_but_ones(node) != _sizes_but_ones(call.args[0]):
            return table
        node = call.args[0]
    if value(node).dim() == 3 and value(node).shape[1] == 1:
        node = derive(at, torch.squeeze, node, 1)
    if is_half:
        node = derive(at, operator.getitem, derive(at, torch.chunk, node, 2, -1), 0)
    return derive(at, torch.neg, node) if is_negative else node


def _sizes_but_ones(node: fx.Node) -> list[int]:
    """Return the sizes of a tensor other than 1. A view to a shape with the same ones keeps the
    order of the elements."""
    return [size for size in value(node).shape if size != 1]


def _forms(function: Any, names: tuple[str, ...]) -> Iterator[RotaryForm]:
    """Yield the forms of call that may be rope. `unsqueeze_dim` is the dimension of the heads."""
    count = tables_of(names)
    default = inspect.signature(function).parameters.get(UNSQUEEZE_DIM)
    for layout in LAYOUTS:
        heads = layout.index("h")
        dims = [None] if default is None else [heads, heads - len(layout)]
        rows = [("3" if SECTIONS in names else "") + ("cs" if "b" in layout else "s")]
        rows += ["s1"] if count == 1 else []
        for dim, width, row in itertools.product(dict.fromkeys(dims), WIDTHS, rows):
            if default is None or dim in (default.default, 1, 2):
                given = {UNSQUEEZE_DIM: dim, SECTIONS: SECTIONS}
                shapes = layout, layout.replace("h", "g"), *[row + width] * count
                yield RotaryForm(shapes, tuple(given.get(one) for one in names[2 + count :]))


def parameters_of(function: Any) -> tuple[str, ...]:
    """Return the names of a function's parameters if they may be those of a rotary embedding,
    else ().

    They are queries, keys and tables: cos and sin, or freqs, which is complex. `fuse` calls no
    function of a model with other parameters.
    """
    if not inspect.isfunction(function):
        return ()
    parameters = list(inspect.signature(function).parameters.values())
    names = tuple(parameter.name for parameter in parameters)
    count = 2 + tables_of(names)
    if count == 2 or any(p.kind is not p.POSITIONAL_OR_KEYWORD for p in parameters):
        return ()
    needed = [p.name for p in parameters[count:] if p.default is p.empty]
    return names if needed in ([], [SECTIONS]) else ()


def tables_of(names: Sequence[str]) -> int:
    """Return the number of tables that a function with these parameters takes; 0 if unknown."""
    if len(names) >= 4 and "cos" in names[2] and "sin" in names[3]:
        return 2
    return int(len(names) >= 3 and "freqs" in names[2])


def _not_called_as_rope(module: nn.Module) -> Iterator[str]:
    """Yield the reasons that functions with a rotary name are left, for the report."""
    for name, function in _named_rotary(getattr(classes.class_of(module), "forward", None)):
        if inspect.isfunction(function) and not parameters_of(function):
            names = ", ".join(inspect.signature(function).parameters)
            yield f"{name} takes ({names}), not queries, keys and their tables"
    # The forward of diffusers' attention calls a processor, an attribute that is no module.
    for attribute in own_attributes(module).values():
        call = getattr(type(attribute), "__call__", None)  # noqa: B004
        if not isinstance(attribute, nn.Module):
            for name, _ in _named_rotary(call):
                yield f"{name} is called by its {type(attribute).__name__}, not by its forward"


def _named_rotary(caller: Any) -> Iterator[tuple[str, Any]]:
    """Yield the global functions to which a function refers by a name that suggests rope."""
    for name, function in globals_of(caller):
        if ROTARY_NAME.search(name) and callable(function):
            yield name, function
