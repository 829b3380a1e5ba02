"""Reads a rotation from whatever code computes it, by comparison with the definition of the op.

A rotation is linear in x, and its elements mix only within a position. So the code is the matrix
that it computes from the identity for x, with random numbers for the tables; it is the op if the
op's definition computes that matrix from some of the tables, with some of its options.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from ....library import OPS
from ...engine.canonical import calls, canonical, is_tensor, value
from ...engine.casts import represents
from ...engine.pattern import Match
from .elements import Elements
from .tables import Table, alike

# No head is wider, and the matrix of a wider row would be large.
WIDEST = 1024
# What is done to tables on their way to the product, and that the op may do instead.
_UNDONE = {
    "expand", "getitem", "identity", "neg", "repeat_interleave", "stack", "unsqueeze", "view",
}  # fmt: skip
_WIDE: dict[str, Any] = {"dtype": torch.float64, "device": "cpu"}
TABLES = ("cos", "sin", "scale")
ROUNDED = "a value on the way is rounded to a narrower dtype than that of the rotated tensor"


class Options(NamedTuple):
    """The options of the op, and whether sin is to be negated."""

    interleaved: bool = False
    per_pair: bool = False
    deinterleave: bool = False
    back: bool = False


_OPTIONS = [Options(*flags) for flags in itertools.product((False, True), repeat=4)]


class Rotation(NamedTuple):
    """The options, and the tables: equal ones together, first what the others are made of."""

    options: Options
    cos: list[Table]
    sin: list[Table] | None = None
    scale: list[Table] | None = None


class Reader:
    """Matches the rotations whose last operation is `op`, as a `Pattern` does.

    A match has the values x, cos and sin, and scale if both tables are multiplied by one; the whole
    `Rotation`; and "given", the tables that x is multiplied by, which may be made of those.
    """

    OPS = ("add", "sub", "cat", "flatten", "view")

    def __init__(self, op: str) -> None:
        self.op: str | None = op

    def match(self, node: fx.Node) -> Match | None:
        elements = Elements(node)
        width = elements.number(value(node).shape[-1]) if value(node).dim() else None
        if width is None or width > WIDEST:
            return None
        candidates = [x for x in elements.linear_in(node) if x is not node]
        # The farthest first, which is x before its pairs are brought into halves.
        readings = [_Reading(elements, x, width) for x in reversed(candidates)]
        close: Match | None = None
        for i, reading in enumerate(readings):
            rotation = reading.rotation()
            if not isinstance(rotation, Rotation):
                if rotation is not None:
                    close = Match(node, {"x": reading.x}, reading.nodes, rotation)
                continue
            for symbol in reading.symbols:
                # Adds a guard.
                int(symbol)
            equal = [one for one in readings[i:] if torch.equal(one.matrix, reading.matrix)]
            kept = [one for one in equal if one.holds_x()]
            if not kept:
                return Match(node, {"x": equal[-1].x}, equal[-1].nodes, ROUNDED)
            # Of several casts and copies the last.
            return kept[-1].match(rotation)
        return close


class _Reading:
    """The code between x and a result that is linear in it."""

    def __init__(self, elements: Elements, x: fx.Node, width: int) -> None:
        self.x, self._of = x, elements
        self.nodes: frozenset[fx.Node] = frozenset()
        self.tables: list[Table] = []
        # What x is multiplied by, and the numbers of columns of that and of the product.
        self.given: dict[fx.Node, tuple[int, int]] = {}
        self._known: dict[Any, Tensor] = {(x, 1): torch.eye(width, **_WIDE)}
        self.symbols = elements.symbols = []
        self.matrix: Tensor = self._elements(elements.root, 1)

    def _elements(self, node: fx.Node, inner: int) -> Tensor:
        if (node, inner) not in self._known:
            call, step = canonical(node), self._of.step(node, inner)
            assert call is not None and step is not None
            self.nodes |= {node, *call.through}
            given = [self._operand(one, of, node) for one, of in step.operands]
            self._known[node, inner] = step.compute(*given)
        return self._known[node, inner]

    def _operand(self, one: Any, inner: int, of: fx.Node) -> Any:
        if not is_tensor(one):
            return one if isinstance(one, (int, float)) else math.nan
        if self.x in self._of.linear_in(one, inner):
            return self._elements(one, inner)
        inner = min(inner, value(one).dim())
        dims = tuple(range(3 - value(one).dim() + inner, 3))
        table = self._table(one, dims, inner)
        if value(of).is_complex() and not table.is_complex():
            self.tables.append(Table(one, dims, inner, table.to(torch.complex128)))
        self.given[one] = table.shape[-1], self._of.number(value(of).shape[-1]) or 0
        return table

    def _table(self, node: Any, dims: tuple[int, ...], inner: int) -> Tensor:
        """The elements of a table, made of those of the tables that it is made of."""
        if (node, dims, inner) not in self._known:
            found = self._known[node, dims, inner] = self._made(node, dims, inner)
            if isinstance(node, fx.Node):
                self.tables.append(Table(node, dims, inner, found))
        return self._known[node, dims, inner]

    def _made(self, node: Any, dims: tuple[int, ...], inner: int) -> Tensor:
        call = canonical(node)
        if call is not None and call.op == "unsqueeze":
            # Dynamo's symbol of an argument that is a dimension is a constant.
            place = int(value(call.args[1]))
            place += len(dims) + inner if place < 0 else 0
            if place < len(dims):
                return self._table(call.args[0], (*dims[:place], *dims[place + 1 :]), inner)
        if call is not None and call.op in _UNDONE and isinstance(node, fx.Node):
            step = self._of.step(node, inner)
            if step is not None and all(isinstance(one, fx.Node) for one, _ in step.operands):
                return step.compute(*(self._table(one, dims, of) for one, of in step.operands))
        return self._numbers(node, dims, inner)

    def _numbers(self, node: Any, dims: tuple[int, ...], inner: int) -> Tensor:
        """Numbers for a table, the same for tables that are made in the same way."""
        for table in self.tables:
            if (table.dims, table.inner) == (dims, inner) and alike(table.node, node):
                return table.elements
        sizes = self._of.sizes(node, inner)
        assert sizes is not None
        generator = torch.Generator("cpu").manual_seed(len(self.tables))
        real, imaginary = torch.rand((2, 1, *sizes), generator=generator, **_WIDE) + 1
        return torch.complex(real, imaginary) if value(node).is_complex() else real

    def holds_x(self) -> bool:
        """Whether no value on the way is rounded to a narrower dtype than that of x."""
        casts = (calls(node, "cast") for node in self.nodes)
        dtypes = {value(self._of.root).dtype, *(one.args[1] for one in casts if one)}
        return all(represents(dtype, value(self.x).dtype) for dtype in dtypes)

    def match(self, rotation: Rotation) -> Match:
        values = {"x": self.x, "rotation": rotation, "given": (*self.given,)}
        tables = zip(TABLES, rotation[1:], strict=True)
        values |= {name: equal[0].node for name, equal in tables if equal is not None}
        return Match(self._of.root, values, self.nodes)

    def rotation(self) -> Rotation | str | None:
        """The rotation that the matrix is, or how code that mixes the same elements differs from
        the op; None for other code."""
        mixed = self.matrix != 0
        R = int((mixed.sum(0) == 2).sum())
        pairings = _pairings(len(mixed), R)
        options = [one for one, elements in pairings.items() if torch.equal(elements, mixed)]
        if not R and any(one.elements.is_complex() for one in self.tables):
            # Complex numbers by real ones, of which the op says that it does not take them.
            options = [Options()]
        if not options:
            is_inverse = any(torch.equal(one, mixed.T) for one in pairings.values())
            return "it reads pairs in halves and writes them interleaved" if is_inverse else None
        tables, factors = _together(self.tables), self.matrix[:, :R][mixed[:, :R]].abs()
        numbers, is_signed = [one.elements for one in self.tables], False
        scales: Sequence[list[Table] | None] = (None,)
        if is_scaled := not _have(numbers, factors):
            pairs = itertools.combinations(numbers, 2)
            products = [
                a * b for a, b in pairs if a.shape == b.shape or (1, 1) in (a.shape, b.shape)
            ]
            if not _have([*numbers, *products], factors):
                return None
            scales = tables
        for scale, cos, sin in itertools.product(scales, tables, (*tables, None)):
            given = [one[0].elements for one in (cos, sin) if one is not None]
            if scale is not None:
                by = scale[0].elements
                if any(by.shape not in ((1, 1), one.shape) for one in given):
                    continue
                given = [one * by for one in given]
            for one in options if _have(given, factors) else ():
                defined = _defined(len(mixed), one, *given)
                if defined is not None and torch.equal(defined, self.matrix):
                    return Rotation(one, cos, sin, scale)
                is_signed |= defined is not None and torch.equal(defined.abs(), self.matrix.abs())
        if is_signed:
            return "its signs are not those of a rotation"
        if is_scaled:
            return "its tables are products, and not of one factor for both"
        for columns, wanted in self.given.values():
            if columns != wanted:
                return f"a table has {columns} columns, not {wanted}"
        return "the two elements of a pair are multiplied by different tables"


def _together(tables: Sequence[Table]) -> list[list[Table]]:
    """The tables of a number an element, and those of a matrix a pair; equal ones together."""
    found: dict[Any, list[Table]] = {}
    for table in tables:
        if table.inner in (1, 3):
            key = table.inner, table.elements.dtype, *table.elements.flatten().tolist()
            found.setdefault(key, []).append(table)
    return list(found.values())


def _have(tables: Sequence[Tensor], factors: Tensor) -> bool:
    numbers = [torch.view_as_real(one) if one.is_complex() else one for one in tables]
    return bool(torch.isin(factors, torch.cat([one.abs().flatten() for one in numbers])).all())


@functools.lru_cache
def _pairings(width: int, R: int) -> dict[Options, Tensor]:
    """Which elements the definition mixes, for each of its options that takes R of them."""
    ones = {one: torch.ones((1, R // (1 + one.per_pair)), **_WIDE) for one in _OPTIONS}
    found = {one: _defined(width, one, table, table) for one, table in ones.items()}
    return {one: defined != 0 for one, defined in found.items() if defined is not None}


def _defined(width: int, options: Options, cos: Tensor, sin: Tensor | None = None) -> Tensor | None:
    """The matrix of the op's definition, or None if it does not take these tables."""
    x = torch.eye(width, **_WIDE)[:, None, None]
    interleaved, per_pair, deinterleave, back = options
    sin = -sin if back and sin is not None else sin
    try:
        y, _ = OPS["rope"].check_and_define(
            x, x[:, :0], cos, sin, interleaved, per_pair, None, deinterleave
        )
    except (TypeError, ValueError):
        return None
    return y[:, 0, 0]
