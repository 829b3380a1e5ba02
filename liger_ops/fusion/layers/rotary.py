"""Functions that compute rope, and the forms of call in which they do."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Layout of the queries -> functions to view them as (B, heads, S, D), as the op does, and back.
LAYOUTS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "bhsd": (lambda x: x, lambda x: x),
    "bshd": (lambda x: x.transpose(1, 2), lambda x: x.transpose(1, 2)),
    "shd": (lambda x: x.transpose(0, 1).unsqueeze(0), lambda x: x.squeeze(0).transpose(0, 1)),
}

# Optional parameters with a known meaning. Any other has to be None.
UNSQUEEZE_DIM = "unsqueeze_dim"
SECTIONS = "mrope_section"

# How a function treats tables of a wider dtype than the queries.
KEPT, WIDENED = "kept", "widened"
LOW_PRECISION = (torch.bfloat16, torch.float16)


def parameters_of(function: Any) -> tuple[str, ...]:
    """The names of a function's parameters if they are those of a rotary embedding.

    They are queries, keys and tables: cos and sin, or freqs, which is complex. No other function of
    a model is called.
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
    """The number of tables that a function with these parameter names takes; 0 if unknown."""
    if len(names) >= 4 and "cos" in names[2] and "sin" in names[3]:
        return 2
    return int(len(names) >= 3 and "freqs" in names[2])


@dataclass(frozen=True)
class Form:
    """A form of call that computes rope, and the op's options for it.

    table_width: the width of the tables, in terms of `table_width`. half_tables: whether only the
    first half of each row of the tables is used. back: whether the function rotates in the other
    direction, by -sin. heads_in_tables: whether the tables are (S, 1, width), with a dimension for
    the heads and none for the batch.
    """

    unsqueeze_dim: int | None
    layout: str
    table_width: str
    half_tables: bool
    options: tuple[tuple[str, Any], ...]
    back: bool = False
    heads_in_tables: bool = False

    def fits(self, q: Tensor, k: Tensor, tables: Sequence[Tensor], has_sections: bool) -> bool:
        """Whether tensors have this form, and only the batch dimension is broadcast."""
        rank = len(self.layout)
        if q.dim() != rank or k.dim() != rank or q.dtype is not k.dtype:
            return False
        cos = tables[0]
        if any(table.shape != cos.shape or table.dtype is not cos.dtype for table in tables):
            return False
        D, S = q.shape[-1], q.shape[self.layout.index("s")]
        if k.shape[-1] != D or k.shape[self.layout.index("s")] != S:
            return False
        if self.heads_in_tables:
            if has_sections or cos.dim() != 3 or cos.shape[:2] != (S, 1):
                return False
            cos = cos.transpose(0, 1)
        elif cos.dim() != rank - 1 + has_sections or cos.shape[-2] != S:
            return False
        if self.table_width != table_width(cos.shape[-1], D):
            return False
        if "b" not in self.layout:
            return True
        B = q.shape[0]
        return k.shape[0] == B and (cos.shape[-3] == 1 or cos.shape[-3] == B)

    def __call__(
        self, op: Callable[..., Any], q: Tensor, k: Tensor,
        tables: Sequence[Tensor], sections: Sequence[int] | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Call `op`, rope or another function with its arguments, on tensors of this form."""
        inward, outward = LAYOUTS[self.layout]
        if self.heads_in_tables:
            tables = [table.squeeze(1) for table in tables]
        if self.half_tables:
            half = tables[0].shape[-1] // 2
            tables = [table[..., :half] for table in tables]
        if self.back:
            tables = [tables[0], -tables[1]]
        options = dict(self.options)
        if sections is not None:
            options["sections"] = list(sections)
        q, k = op(inward(q), inward(k), *tables, **options)
        return outward(q), outward(k)


def table_width(R: int, D: int) -> str:
    """The width R of a table, relative to the width D of a head."""
    if R == D:
        return "whole"
    if 2 * R == D:
        return "half"
    return "part" if R < D and R % 2 == 0 else "other"


@dataclass(frozen=True)
class Rotary:
    """A function of queries, keys and tables, and what it computes.

    tables: how many it takes. wide_tables: the dtype of the result for float32 or complex64 tables
    with queries of another dtype: KEPT, the queries' dtype; WIDENED, float32, as in autocast; None,
    anything else. in_float64: whether it is the same in float64. function: the id of the function,
    so that a class made for one function is not used for another with the same forms.
    """

    name: str
    parameters: tuple[str, ...]
    tables: int
    unsqueeze_dim: int | None
    wide_tables: str | None
    forms: tuple[Form, ...]
    in_float64: bool
    function: int

    def takes(self, table_dtype: torch.dtype, dtype: torch.dtype) -> bool:
        """Whether it computes rope for tables of another dtype than the queries."""
        if self.wide_tables == WIDENED:
            return table_dtype is torch.float32 and dtype in LOW_PRECISION
        return self.wide_tables == KEPT and table_dtype in (torch.float32, torch.complex64)

    def form_of(self, given: dict[str, Any]) -> Form | None:
        """The form of a call with these arguments, or None if the call does not compute rope."""
        names = self.parameters[: 2 + self.tables]
        for name, value in given.items():
            if name not in (*names, UNSQUEEZE_DIM, SECTIONS) and value is not None:
                return None
        for name in names:
            if not isinstance(given.get(name), Tensor):
                return None
        q, k, *tables = (given[name] for name in names)
        if self.tables == 1 and not tables[0].is_complex():
            # After model.to(torch.bfloat16), which drops the imaginary parts.
            return None
        if q.dtype is torch.float64 and not self.in_float64:
            return None
        if tables[0].dtype is not q.dtype and not self.takes(tables[0].dtype, q.dtype):
            return None
        unsqueeze_dim = given.get(UNSQUEEZE_DIM, self.unsqueeze_dim)
        has_sections = given.get(SECTIONS) is not None
        if has_sections is not (SECTIONS in self.parameters):
            return None
        for form in self.forms:
            if form.unsqueeze_dim == unsqueeze_dim and form.fits(q, k, tables, has_sections):
                return form
        return None
