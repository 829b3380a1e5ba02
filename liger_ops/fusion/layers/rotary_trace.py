"""Recognise the rope of a function with the patterns of the backend's rewrite."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from ...rewrites import rewrite
from ...rewrites.engine.canonical import IDENTITY, canonical, value
from ...rewrites.engine.graph_state import needed_by
from ...rewrites.engine.recognise import bound, reason_for_none
from ..probing import DEVICE, NotAnOp, dtype_name, first_line
from ..trace import ANY_SIZES, Trace
from .program import check_unused
from .rotary import (
    KEPT,
    LAYOUTS,
    LOW_PRECISION,
    SECTIONS,
    UNSQUEEZE_DIM,
    WIDENED,
    Form,
    Rotary,
    parameters_of,
    tables_of,
)

# The sizes of a trace. All differ, so that the shape of a view says which dimension is which.
SIZES = {"b": 2, "s": 5, "d": 12}
HEADS, K_HEADS = 6, 3

# Widths by the names of `table_width`. A width of 8 of 12 rotates a part of the head.
TABLE_WIDTHS = {"whole": SIZES["d"], "half": SIZES["d"] // 2, "part": 8}
TRACED_SECTIONS = [1, 3, 2]

# Operations between the op and the function's arguments and results: views of other layouts, and
# casts to a dtype of theirs or a wider one, since the op computes in float32 and rounds once.
VIEWS = {IDENTITY, "cast", "contiguous", "transpose", "unsqueeze", "squeeze"}
WIDE = {torch.float32, torch.float64, torch.complex64}


def find(name: str, function: Callable[..., Any]) -> Rotary:
    """Find the forms of call in which a function computes rope.

    It is traced with queries and keys of each layout and tables of each width in bfloat16, and
    recognised as the backend's rewrite would. If it has a parameter `unsqueeze_dim`, that is the
    position of the heads. The first form is traced in float16 and float32 too, where it must be the
    same, and with tables of float32. Results of all forms must have the same dtypes.

    Raises:
        NotAnOp: no form computes rope; the text gives the reason.
    """
    return _Function(name, function).found()


class _Function:
    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self.name = name
        self.function = function
        self.parameters = parameters_of(function)
        self.tables = tables_of(self.parameters)
        self.sections = TRACED_SECTIONS if SECTIONS in self.parameters else None
        default = inspect.signature(function).parameters.get(UNSQUEEZE_DIM)
        self.default = None if default is None else default.default

    def found(self) -> Rotary:
        forms, reasons = [], []
        for call in self.calls():
            dtypes = self.dtypes(call, torch.bfloat16)
            if dtypes is None:
                continue
            try:
                if dtypes != {torch.bfloat16}:
                    raise NotAnOp(f"{self.name} returns another dtype than bfloat16")
                forms.append(self.recognised(call, torch.bfloat16))
            except NotAnOp as reason:
                reasons.append(reason)
        if not forms:
            raise reasons[0] if reasons else NotAnOp(f"{self.name} computes no rope")
        for dtype in (torch.float16, torch.float32):
            self.compare(forms, dtype, dtype)
        wide, in_float64 = self.wide_tables(forms), self.in_float64(forms)
        known = (self.name, self.parameters, self.tables, self.default)
        return Rotary(*known, wide, tuple(forms), in_float64, id(self.function))

    def calls(self) -> Iterator[Form]:
        """Forms of call that may be rope, without the op's options."""
        for layout in LAYOUTS:
            dims: list[int | None] = [None]
            if self.default is not None:
                # The position of the heads, and the default if that counts from the end.
                heads = layout.index("h")
                dims = list(dict.fromkeys([heads, heads - len(layout)]))
                dims = [dim for dim in dims if dim in (self.default, 1, 2)]
            for dim in dims:
                for width in TABLE_WIDTHS:
                    yield Form(dim, layout, width, False, ())
                    if self.tables == 1:
                        yield Form(dim, layout, width, False, (), heads_in_tables=True)

    def compare(self, forms: Sequence[Form], dtype: torch.dtype, table_dtype: torch.dtype) -> None:
        """Raise NotAnOp if the function is something else in other dtypes."""
        for form in forms:
            if self.dtypes(form, dtype, table_dtype) != {dtype}:
                raise NotAnOp(f"{self.name} returns another dtype than {dtype_name(dtype)}")
        if self.recognised(forms[0], dtype, table_dtype) != forms[0]:
            raise NotAnOp(f"{self.name} is another rope in {dtype_name(dtype)}")

    def in_float64(self, forms: Sequence[Form]) -> bool:
        try:
            self.compare(forms, torch.float64, torch.float64)
        except NotAnOp:
            return False
        return True

    def wide_tables(self, forms: Sequence[Form]) -> str | None:
        """Return how float32 tables of narrower queries are used, in autocast or not, or None."""
        try:
            if self.recognised(forms[0], torch.bfloat16, torch.float32) != forms[0]:
                return None
        except NotAnOp:
            return None
        returned: set[Any] = set()
        for dtype in LOW_PRECISION:
            for autocast in (False, True):
                with torch.autocast(DEVICE.type, dtype=dtype, enabled=autocast):
                    for form in forms:
                        dtypes = self.dtypes(form, dtype, torch.float32)
                        returned |= {KEPT if one is dtype else one for one in dtypes or [None]}
        if returned == {KEPT}:
            return KEPT
        return WIDENED if returned == {torch.float32} and self.tables == 2 else None

    def dtypes(
        self, call: Form, dtype: torch.dtype, table_dtype: torch.dtype | None = None
    ) -> set[torch.dtype] | None:
        """The dtypes of the function's results; None if it does not accept such a call."""
        given = self.given(call, dtype, table_dtype or dtype)
        tensors = [torch.zeros(shape, dtype=one) for shape, one in given.values()]
        try:
            found = self.called(call, tensors)
        except Exception:
            return None
        if not isinstance(found, (tuple, list)):
            return None
        if [x.shape for x in tensors[:2]] != [getattr(y, "shape", None) for y in found]:
            return None
        return {y.dtype for y in found}

    def given(
        self, call: Form, dtype: torch.dtype, table_dtype: torch.dtype
    ) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """The shapes and dtypes of queries, keys and tables."""
        shapes = [
            tuple({**SIZES, "h": heads}[name] for name in call.layout) for heads in (HEADS, K_HEADS)
        ]
        rows = [SIZES[name] for name in call.layout if name in "bs"]
        if call.heads_in_tables:
            rows = [SIZES["s"], 1]
        table = (*((3,) if self.sections else ()), *rows, TABLE_WIDTHS[call.table_width])
        if self.tables == 1:
            table_dtype = torch.complex64
        shapes, dtypes = [*shapes, table, table], [dtype, dtype, table_dtype, table_dtype]
        names = self.parameters[: 2 + self.tables]
        return dict(zip(names, zip(shapes, dtypes, strict=True), strict=False))

    def called(self, call: Form, tensors: Sequence[Tensor]) -> Any:
        more = {UNSQUEEZE_DIM: call.unsqueeze_dim, SECTIONS: self.sections}
        given = {name: value for name, value in more.items() if name in self.parameters}
        return self.function(*tensors, **given)

    def recognised(
        self, call: Form, dtype: torch.dtype, table_dtype: torch.dtype | None = None
    ) -> Form:
        """The form of a call with the op's options."""
        trace = Trace()
        given = self.given(call, dtype, table_dtype or dtype)
        any_sizes = (2, 5) if dtype is torch.bfloat16 else (3, 4)
        free = {SIZES[name]: ANY_SIZES[n] for name, n in zip("bs", any_sizes, strict=True)}
        tensors = [
            trace.input(name, tuple(free.get(n, n) for n in shape), one)
            for name, (shape, one) in given.items()
        ]
        try:
            with trace.running():
                results = self.called(call, tensors)
        except NotAnOp as reason:
            raise NotAnOp(f"{self.name}: {reason}") from None
        except Exception as error:
            raise NotAnOp(f"{self.name} fails on fake tensors: {first_line(error)}") from None
        module = trace.module(results)
        report = rewrite(module, ["rope"], strict=True)
        *_, output = module.graph.nodes
        needed = needed_by(output)
        found = list(bound(needed))
        try:
            if len(found) != 1 or not all(_is_of(one, found[0][0]) for one in output.args[0]):
                is_more = found and all(one.used for one in report.findings)
                raise NotAnOp(
                    "it is rope and more" if is_more else reason_for_none(report, ["rope"])
                )
            for node in module.graph.nodes:
                if node not in needed:
                    check_unused(node)
        except NotAnOp as reason:
            text = str(reason).replace("rope: ", "it computes no rope: ")
            raise NotAnOp(f"{self.name} {text.removeprefix('it ')}") from None
        return self.form(call, *found[0], output, {dtype, table_dtype or dtype} | WIDE)

    def form(
        self, call: Form, op: fx.Node, arguments: dict[str, Any], output: Any,
        dtypes: set[torch.dtype],
    ) -> Form:  # fmt: skip
        """The form, if the op is of the function's own arguments and its results are the op's."""
        for i, (operand, result) in enumerate(zip("qk", output.args[0], strict=True)):
            x, y = self.viewed(arguments[operand], dtypes), self.viewed(result, dtypes)
            wanted = (x.op, x.target) == ("placeholder", self.parameters[i]) and y.args == (op, i)
            # All sizes differ, so the shape says in which order the dimensions are.
            inward, _ = LAYOUTS[call.layout]
            if not wanted or value(arguments[operand]).shape != inward(value(x)).shape:
                raise NotAnOp(f"{self.name} is rope of other tensors than its queries and keys")
        if arguments["sections"] != self.sections:
            raise NotAnOp(f"{self.name} is rope, and of other sections than {SECTIONS}")
        cos, is_half, is_back = self.table(arguments["cos"], dtypes)
        if self.tables == 1:
            if (cos, is_half, is_back) != (self.parameters[2], False, False):
                raise NotAnOp(f"{self.name} is rope of another table than its own")
            return call
        sin, *how = self.table(arguments["sin"], dtypes)
        if (cos, sin, is_back, how[0]) != (*self.parameters[2:4], False, is_half):
            raise NotAnOp(f"{self.name} is rope of other tables than its own")
        options: dict[str, Any] = {"interleaved": arguments["interleaved"]}
        options |= {name: True for name in ("per_pair", "deinterleave") if arguments[name]}
        return replace(call, half_tables=is_half, back=how[1], options=tuple(options.items()))

    def viewed(self, node: fx.Node, dtypes: set[torch.dtype]) -> fx.Node:
        """What `node` is a view or a cast to one of `dtypes` of."""
        while (call := canonical(node)) is not None and call.op in VIEWS:
            if call.op == "cast" and call.args[1] not in dtypes:
                raise NotAnOp(f"{self.name} rounds to {dtype_name(call.args[1])}")
            node = call.args[0]
        return node

    def table(self, node: fx.Node, dtypes: set[torch.dtype]) -> tuple[Any, bool, bool]:
        """The parameter that a table is, whether its first half is used, and its negative."""
        is_half = is_back = False
        while True:
            node = self.viewed(node, dtypes)
            call = canonical(node)
            if call is None:
                return node.target, is_half, is_back
            half = (-1, 0, value(call.args[0]).shape[-1] // 2, 1)
            if call.op == "neg":
                is_back = not is_back
            elif call.op == "view" and _without_ones(node) == _without_ones(call.args[0]):
                pass
            elif call.op == "slice" and call.args[1:] == half:
                is_half = True
            else:
                return None, is_half, is_back
            node = call.args[0]


def _is_of(node: Any, op: fx.Node) -> bool:
    """Whether a result is one of an op's, in another view or dtype."""
    while (call := canonical(node)) is not None and call.op in VIEWS:
        node = call.args[0]
    return getattr(node, "target", None) is operator.getitem and node.args[0] is op


def _without_ones(node: fx.Node) -> list[int]:
    """The sizes of a tensor; views between shapes with the same ones keep the order of elements."""
    return [size for size in value(node).shape if size != 1]
