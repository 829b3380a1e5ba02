"""Find which rope a function computes by comparing its results for chosen tensors."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import library
from .probing import DEVICE, NotAnOp, dtype_name, first_line, uniform
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

# The sizes of a probe. All differ, so that no table is broadcast along a wrong dimension.
BATCH, HEADS, K_HEADS, POSITIONS, WIDTH = 2, 6, 3, 5, 12

# Widths by the names of `table_width`. A width of 8 of 12 rotates a part of the head.
TABLE_WIDTHS = {"whole": WIDTH, "half": WIDTH // 2, "part": 8}
PROBED_SECTIONS = [1, 3, 2]

# Bound in float32 against the definition: two products and a sum of numbers of order 1.
FLOAT32_BOUND = 1e-6


def probe(name: str, function: Callable[..., Any]) -> Rotary:
    """Find the forms of call in which a function computes rope.

    It is called with queries and keys of each layout and tables of each width, all random, and, if
    it has a parameter `unsqueeze_dim`, with its default, 1 and 2. The results are compared with the
    definition of rope under every option: values and gradients in float32, and values in bfloat16
    and float16 within the rounding of code that rounds after every operation. Queries of lower
    precision with float32 tables are compared too, with autocast and without.

    Raises:
        NotAnOp: no form computes rope; the text gives the reason.
    """
    return _Probe(name, function).run()


class _Probe:
    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self.name = name
        self.function = function
        self.parameters = parameters_of(function)
        self.tables = tables_of(self.parameters)
        self.sections = PROBED_SECTIONS if SECTIONS in self.parameters else None
        default = inspect.signature(function).parameters.get(UNSQUEEZE_DIM)
        self.default = None if default is None else default.default

    def run(self) -> Rotary:
        forms = []
        for unsqueeze_dim in sorted({self.default, 1, 2}) if self.default is not None else [None]:
            for layout in LAYOUTS:
                for width in TABLE_WIDTHS:
                    form = self.form(unsqueeze_dim, layout, width)
                    if form is not None:
                        forms.append(form)
        if not forms:
            raise NotAnOp(f"{self.name} computes no rope")
        wide_tables = self.wide_tables(forms)
        return Rotary(
            self.name, self.parameters, self.tables, self.default, wide_tables, tuple(forms)
        )

    def wide_tables(self, forms: Sequence[Form]) -> str | None:
        try:
            self.compare_roundings(forms[0], torch.bfloat16, torch.float32)
            return KEPT
        except NotAnOp:
            if self.tables == 2 and all(map(self.widens, forms)):
                return WIDENED
            return None

    def widens(self, form: Form) -> bool:
        """Whether it computes rope in float32 for float32 tables and narrower queries, with and
        without autocast."""
        for dtype in LOW_PRECISION:
            tensors = self.tensors(form, dtype)
            q, k, *tables = tensors
            for autocast in (False, True):
                with torch.autocast(DEVICE.type, dtype=dtype, enabled=autocast):
                    try:
                        found = self.called(form, tensors)
                    except NotAnOp:
                        return False
                if any(y.dtype is not torch.float32 for y in found):
                    return False
                if not self.agree(found, form, [q.float(), k.float(), *tables]):
                    return False
        return True

    def form(self, unsqueeze_dim: int | None, layout: str, width: str) -> Form | None:
        """The form of this call, or None if the call fails or does not compute rope."""
        candidates = list(self.candidates(unsqueeze_dim, layout, width))
        tensors = self.tensors(candidates[0])
        try:
            found = self.called(candidates[0], tensors)
        except NotAnOp:
            return None
        for form in candidates:
            if self.agree(found, form, tensors):
                self.compare_gradients(form)
                for dtype in (torch.bfloat16, torch.float16):
                    self.compare_roundings(form, dtype, dtype)
                return form
        return None

    def candidates(self, unsqueeze_dim: int | None, layout: str, width: str) -> Iterator[Form]:
        if self.tables == 1:
            yield Form(unsqueeze_dim, layout, width, False, ())
            return
        for half_tables, per_pair in ((False, False), (False, True), (True, True)):
            for interleaved in (False, True):
                options: dict[str, Any] = {"interleaved": interleaved}
                if per_pair:
                    options["per_pair"] = True
                yield Form(unsqueeze_dim, layout, width, half_tables, tuple(options.items()))

    def tensors(
        self,
        form: Form,
        dtype: torch.dtype = torch.float32,
        table_dtype: torch.dtype = torch.float32,
    ) -> list[Tensor]:
        """Queries, keys and tables. Unlike cosines, no number occurs twice in the tables."""
        _, outward = LAYOUTS[form.layout]
        batch = (BATCH,) if "b" in form.layout else ()
        heads = [
            outward(4 * uniform((*(batch or (1,)), count, POSITIONS, WIDTH), seed=count)).to(dtype)
            for count in (HEADS, K_HEADS)
        ]
        leading = (*((3,) if self.sections else ()), *batch, POSITIONS)
        shape = (*leading, TABLE_WIDTHS[form.table_width])
        cos, sin = (uniform(shape, seed=7 + i) + 0.7 for i in range(2))
        if self.tables == 1:
            return [*heads, torch.complex(cos, sin)]
        return [*heads, cos.to(table_dtype), sin.to(table_dtype)]

    def called(self, form: Form, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        more = {UNSQUEEZE_DIM: form.unsqueeze_dim, SECTIONS: self.sections}
        given = {name: value for name, value in more.items() if name in self.parameters}
        try:
            found = self.function(*(tensor.clone() for tensor in tensors), **given)
        except Exception as error:
            raise NotAnOp(f"{self.name} fails on the CPU: {first_line(error)}") from None
        shapes = [x.shape for x in tensors[:2]]
        if not isinstance(found, (tuple, list)) or shapes != [
            y.shape for y in found if isinstance(y, Tensor)
        ]:
            raise NotAnOp(f"{self.name} does not return queries and keys of their shapes")
        return found

    def definition(self, form: Form, tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        q, k, *tables = tensors
        return form(library.OPS["rope"].check_and_define, q, k, tables, self.sections)

    def agree(self, found: Sequence[Tensor], form: Form, tensors: Sequence[Tensor]) -> bool:
        try:
            expected = self.definition(form, tensors)
        except ValueError:
            return False
        return all(
            bool(((y - wanted).abs() <= FLOAT32_BOUND * (1 + wanted.abs())).all())
            for y, wanted in zip(found, expected, strict=True)
        )

    def compare_gradients(self, form: Form) -> None:
        with torch.enable_grad():
            q, k, *tables = self.tensors(form)
            leaves = (q.requires_grad_(), k.requires_grad_())
            expected_y = self.definition(form, (q, k, *tables))
            dy = [uniform(y.shape, seed=11) for y in expected_y]
            expected = torch.autograd.grad(expected_y, leaves, dy)
            try:
                found = torch.autograd.grad(self.called(form, (q, k, *tables)), leaves, dy)
            except RuntimeError as error:
                text = f"the gradient of {self.name} cannot be taken: {first_line(error)}"
                raise NotAnOp(text) from None
        for ours, theirs in zip(expected, found, strict=True):
            if not ((ours - theirs).abs() <= FLOAT32_BOUND * (1 + ours.abs())).all():
                raise NotAnOp(f"{self.name} has the values of rope but another gradient")

    def compare_roundings(self, form: Form, dtype: torch.dtype, table_dtype: torch.dtype) -> None:
        """Check values against the bound for code that rounds both products and the sum."""
        tensors = self.tensors(form, dtype, table_dtype)
        found = self.called(form, tensors)
        if any(y.dtype is not dtype for y in found):
            raise NotAnOp(
                f"{self.name} returns {dtype_name(found[0].dtype)} for queries of"
                f" {dtype_name(dtype)}"
            )
        exact = [x.to(torch.complex128 if x.is_complex() else torch.float64) for x in tensors]
        q, k, *tables = exact
        # Tables are positive: with positive queries too, one of these two adds both products.
        back = [tables[0].conj()] if self.tables == 1 else [tables[0], -tables[1]]
        sums = self.definition(form, [q.abs(), k.abs(), *tables])
        others = self.definition(form, [q.abs(), k.abs(), *back])
        for y, expected, one, other in zip(
            found, self.definition(form, exact), sums, others, strict=True
        ):
            bound = 1.5 * torch.finfo(dtype).eps * torch.maximum(one.abs(), other.abs())
            if not ((y.double() - expected).abs() <= bound).all():
                raise NotAnOp(
                    f"{self.name} has the values of rope in float32 but rounds elsewhere in"
                    f" {dtype_name(dtype)}"
                )
