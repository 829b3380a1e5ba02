"""Read a rotation from whatever code computes it, by comparison with the definition of the op.

A rotation is linear in x, and its elements mix only within a position. Code of this kind is
determined by one matrix: the result that it computes if x is the identity matrix, with random
numbers for the tables. The code computes the op if the op's definition gives the same matrix, with
some of the tables and some of the op's options. The tables are followed back to the tensors that
they are computed from, with how their dimensions correspond to those of x.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from ....library import OPS
from ...engine.canonical import IDENTITY, calls, canonical, is_tensor, same, value
from ...engine.casts import represents
from ...engine.graph_state import needed_by
from ...engine.insertion import Refused, View, derive
from ...engine.maps.index_maps import VIEWS
from ...engine.pattern import Match, skip
from .elements import Elements

# Operations whose results are equal if their arguments are.
_REPEATABLE = VIEWS | {"cast", "chunk", "cos", "item", "neg", "sin", "split", "stack", "unbind"}


class Table(NamedTuple):
    """A tensor that x is multiplied by, or a tensor from which such a one is computed.

    Attributes:
        dims: which dimension of x each dimension of the table's positions belongs to, counted as if
            x had four dimensions.
        inner: the number of dimensions of elements, which come after those of positions.
        elements: numbers that stand for the elements of one position.
    """

    node: fx.Node
    dims: tuple[int, ...]
    inner: int
    elements: Tensor


def same_table(a: Any, b: Any) -> bool:
    """Return whether two tables are one tensor, or are computed from one in the same way."""
    a, b = (skip(table, {IDENTITY})[0] for table in (a, b))
    if a is b or not is_tensor(a) or not is_tensor(b):
        return same(a, b)
    x, y = canonical(a), canonical(b)
    if not is_repeatable(a) or x is None or y is None or x.op != y.op or len(x.args) != len(y.args):
        return False
    return all(
        same_table(p, q) if isinstance(p, fx.Node) and is_tensor(p) else same(p, q)
        for p, q in zip(x.args, y.args, strict=True)
    )


def is_repeatable(node: Any) -> bool:
    """Return whether equal arguments give equal results in the operation of a node."""
    call = canonical(node)
    return call is not None and call.op in _REPEATABLE


def with_sources(tables: Iterable[fx.Node]) -> set[fx.Node]:
    """Return tables, and the nodes that they are computed from by repeatable operations."""
    return needed_by(*tables, end=lambda node: not is_repeatable(node))


@dataclass(frozen=True)
class Placement:
    """Which dimensions of x, counted as if it had four, are the positions and the batch.

    `is_batched` says whether x has a batch dimension, and with it four dimensions.
    """

    positions: int
    batch: int
    is_batched: bool

    def views(self) -> tuple[list[View], list[View]]:
        """Return the views from x to (B, heads, S, D), and those from the op's result back."""
        there: list[View] = [] if self.is_batched else [(torch.unsqueeze, 0)]
        back: list[View] = [] if self.is_batched else [(torch.squeeze, 0)]
        if self.positions == 1:
            there, back = [*there, (torch.transpose, 1, 2)], [(torch.transpose, 1, 2), *back]
        elif self.positions == 0:
            there, back = [*there, (torch.permute, (1, 2, 0, 3))], [(torch.permute, (2, 0, 1, 3))]
        return there, back

    def table(self, at: fx.Node, tables: list[Table]) -> fx.Node:
        """Return one of these equal tables without a dimension for the heads.

        The views for this are inserted before `at`.
        """
        table = next((equal for equal in tables if self.positions in equal.dims), tables[-1])
        node = table.node
        for i, dim in reversed(list(enumerate(table.dims))):
            if dim != self.positions and (dim != self.batch or self.positions == 0):
                node = derive(at, torch.squeeze, node, i - value(node).dim())
        return node


def placement(x: fx.Node, cos: Table) -> Placement:
    """Return which dimensions of x are the positions and the batch, from the shape of a table.

    Raises Refused for a table that differs between heads, or has not a row for each position.
    """
    sizes = tuple(value(x).shape)
    if len(sizes) not in (3, 4):
        raise Refused(f"the rotated tensor has {len(sizes)} dimensions, not 4")
    is_batched = len(sizes) == 4
    sizes = sizes[-4:-1] if is_batched else (1, *sizes[:-1])
    # The table's size for each of x's dimensions but the last.
    rows = [1, 1, 1]
    for dim, size in zip(cos.dims, value(cos.node).shape, strict=False):
        rows[dim] = size
    for positions, other, batch in ((2, 1, 0), (1, 2, 0), (0, 2, 1)):
        broadcast = (rows[other],) if positions else (rows[1], rows[2])
        if all(same(size, 1) for size in broadcast) and same(rows[positions], sizes[positions]):
            return Placement(positions, batch, is_batched)
    raise Refused("its table is not one for all heads, with a number for each position")


# Widest row that is read. No head is wider, and the matrix of a wider row would be large.
WIDEST = 1024
# Operations between a table and the product that the op may do itself, such as to repeat the table
# for both halves of x. The tables behind them are tried as the op's tables too.
_UNDONE = {
    "expand", "getitem", "identity", "neg", "repeat_interleave", "stack", "unsqueeze", "view",
}  # fmt: skip
_WIDE: dict[str, Any] = {"dtype": torch.float64, "device": "cpu"}
TABLES = ("cos", "sin", "scale")
ROUNDED = "a value on the way is rounded to a narrower dtype than that of the rotated tensor"


class RopeOptions(NamedTuple):
    """The options of the op, and `back`: whether sin is negated, as in the backward rotation."""

    interleaved: bool = False
    per_pair: bool = False
    deinterleave: bool = False
    back: bool = False


_OPTIONS = [RopeOptions(*flags) for flags in itertools.product((False, True), repeat=4)]


class Rotation(NamedTuple):
    """The options and the tables of a rotation.

    Several nodes may hold the same table. They are listed together, and those that the others are
    computed from come first.
    """

    options: RopeOptions
    cos: list[Table]
    sin: list[Table] | None = None
    scale: list[Table] | None = None


class Reader:
    """Matches the rotations whose last operation is `op`, as a `Pattern` does.

    A match has the values "x", "cos", "sin", and "scale" if both tables are multiplied by a number
    or a table; "rotation", the whole `Rotation`; and "given", the tensors that x is multiplied by,
    which may be computed from these tables.
    """

    OPS = ("add", "sub", "cat", "view")

    def __init__(self, op: str) -> None:
        self.op: str | None = op

    def match(self, node: fx.Node) -> Match | None:
        elements = Elements(node)
        width = elements.number(value(node).shape[-1]) if value(node).dim() else None
        if width is None or width > WIDEST:
            return None
        candidates = [x for x in elements.linear_in(node) if x is not node]
        # The farthest candidate first: that is x before its pairs are brought into halves.
        readings = [_Reading(elements, x, width) for x in reversed(candidates)]
        near_miss: Match | None = None
        for i, reading in enumerate(readings):
            rotation = reading.rotation()
            if not isinstance(rotation, Rotation):
                if rotation is not None:
                    near_miss = Match(node, {"x": reading.x}, reading.nodes, rotation)
                continue
            for symbol in reading.symbols:
                # Adds a guard: the rotation was read with the number that the symbol has now.
                int(symbol)
            equal = [r for r in readings[i:] if torch.equal(r.matrix, reading.matrix)]
            kept = [r for r in equal if r.holds_x()]
            if not kept:
                return Match(node, {"x": equal[-1].x}, equal[-1].nodes, ROUNDED)
            # Of several casts and copies of x, take the last.
            return kept[-1].match(rotation)
        return near_miss


class _Reading:
    """The code between x and a result that is linear in it, as a matrix.

    Attributes:
        matrix: row i has the result for the i-th unit vector as x.
        given: the tensors that x is multiplied by, each with its number of columns and that of the
            product.
        symbols: the symbolic sizes whose current numbers the matrix depends on.
    """

    def __init__(self, elements: Elements, x: fx.Node, width: int) -> None:
        self.x, self._code = x, elements
        self.nodes: frozenset[fx.Node] = frozenset()
        self.tables: list[Table] = []
        self.given: dict[fx.Node, tuple[int, int]] = {}
        self._cache: dict[Any, Tensor] = {(x, 1): torch.eye(width, **_WIDE)}
        self.symbols = elements.symbols = []
        self.matrix: Tensor = self._elements(elements.root, 1)

    def _elements(self, node: fx.Node, inner: int) -> Tensor:
        """Compute the elements of a value that is linear in x, for each unit vector as x."""
        if (node, inner) not in self._cache:
            call, step = canonical(node), self._code.step(node, inner)
            assert call is not None and step is not None
            self.nodes |= {node, *call.through}
            operands = [self._operand(x, x_inner, node) for x, x_inner in step.operands]
            self._cache[node, inner] = step.compute(*operands)
        return self._cache[node, inner]

    def _operand(self, operand: Any, inner: int, user: fx.Node) -> Any:
        """Return the elements of an operand of `user`: of x's side, of a table, or a number."""
        if not is_tensor(operand):
            # NaN, for a symbolic number, is equal to nothing, so that no rotation is read.
            return operand if isinstance(operand, (int, float)) else math.nan
        if self.x in self._code.linear_in(operand, inner):
            return self._elements(operand, inner)
        inner = min(inner, value(operand).dim())
        # Broadcasting aligns the table's positions with the last of x's three.
        dims = tuple(range(3 - value(operand).dim() + inner, 3))
        table = self._table(operand, dims, inner)
        if value(user).is_complex() and not table.is_complex():
            self.tables.append(Table(operand, dims, inner, table.to(torch.complex128)))
        self.given[operand] = table.shape[-1], self._code.number(value(user).shape[-1]) or 0
        return table

    def _table(self, node: Any, dims: tuple[int, ...], inner: int) -> Tensor:
        """Compute a table's elements from the elements of its source tables."""
        if (node, dims, inner) not in self._cache:
            elements = self._cache[node, dims, inner] = self._from_sources(node, dims, inner)
            if isinstance(node, fx.Node):
                self.tables.append(Table(node, dims, inner, elements))
        return self._cache[node, dims, inner]

    def _from_sources(self, node: Any, dims: tuple[int, ...], inner: int) -> Tensor:
        call = canonical(node)
        if call is not None and call.op == "unsqueeze":
            # Dynamo may make a symbol of a dimension that is an argument; it is a constant.
            dim = int(value(call.args[1]))
            dim += len(dims) + inner if dim < 0 else 0
            if dim < len(dims):
                return self._table(call.args[0], (*dims[:dim], *dims[dim + 1 :]), inner)
        if call is not None and call.op in _UNDONE and isinstance(node, fx.Node):
            step = self._code.step(node, inner)
            if step is not None and all(isinstance(x, fx.Node) for x, _ in step.operands):
                return step.compute(*(self._table(x, dims, i) for x, i in step.operands))
        return self._numbers(node, dims, inner)

    def _numbers(self, node: Any, dims: tuple[int, ...], inner: int) -> Tensor:
        """Draw numbers for a table; tables that are computed in the same way get the same."""
        for table in self.tables:
            if (table.dims, table.inner) == (dims, inner) and same_table(table.node, node):
                return table.elements
        sizes = self._code.sizes(node, inner)
        assert sizes is not None
        generator = torch.Generator("cpu").manual_seed(len(self.tables))
        real, imaginary = torch.rand((2, 1, *sizes), generator=generator, **_WIDE) + 1
        return torch.complex(real, imaginary) if value(node).is_complex() else real

    def holds_x(self) -> bool:
        """Return whether no intermediate value is rounded to a narrower dtype than that of x."""
        casts = (calls(node, "cast") for node in self.nodes)
        dtypes = {value(self._code.root).dtype, *(cast.args[1] for cast in casts if cast)}
        return all(represents(dtype, value(self.x).dtype) for dtype in dtypes)

    def match(self, rotation: Rotation) -> Match:
        values = {"x": self.x, "rotation": rotation, "given": (*self.given,)}
        tables = zip(TABLES, rotation[1:], strict=True)
        values |= {name: equal[0].node for name, equal in tables if equal is not None}
        return Match(self._code.root, values, self.nodes)

    def rotation(self) -> Rotation | str | None:
        """Return the rotation that the matrix is.

        For code that mixes the same elements as the op, but is another computation, return how it
        differs; for other code None.
        """
        # Which elements of x each element of the result depends on. An element that is rotated
        # depends on two, an element that passes through on one.
        mixed = self.matrix != 0
        R = int((mixed.sum(0) == 2).sum())
        pairings = _pairings(len(mixed), R)
        options = [option for option, pairs in pairings.items() if torch.equal(pairs, mixed)]
        if not R and any(table.elements.is_complex() for table in self.tables):
            # Complex numbers times real tables. The op refuses these, with a message of its own.
            options = [RopeOptions()]
        if not options:
            is_inverse = any(torch.equal(pairs, mixed.T) for pairs in pairings.values())
            return "it reads pairs in halves and writes them interleaved" if is_inverse else None
        # `factors` are the numbers that the elements of x are multiplied by. All of them must occur
        # in the tables, or in products of two tables if these are scaled. That is checked first,
        # because trying the options takes longer.
        tables, factors = _candidate_tables(self.tables), self.matrix[:, :R][mixed[:, :R]].abs()
        numbers, is_signed = [table.elements for table in self.tables], False
        scales: Sequence[list[Table] | None] = (None,)
        if is_scaled := not _occur_in(numbers, factors):
            pairs = itertools.combinations(numbers, 2)
            products = [
                a * b for a, b in pairs if a.shape == b.shape or (1, 1) in (a.shape, b.shape)
            ]
            if not _occur_in([*numbers, *products], factors):
                return None
            scales = tables
        for scale, cos, sin in itertools.product(scales, tables, (*tables, None)):
            elements = [equal[0].elements for equal in (cos, sin) if equal is not None]
            if scale is not None:
                factor = scale[0].elements
                if any(factor.shape not in ((1, 1), x.shape) for x in elements):
                    continue
                elements = [x * factor for x in elements]
            for option in options if _occur_in(elements, factors) else ():
                defined = _defined(len(mixed), option, *elements)
                if defined is not None and torch.equal(defined, self.matrix):
                    return Rotation(option, cos, sin, scale)
                is_signed |= defined is not None and torch.equal(defined.abs(), self.matrix.abs())
        if is_signed:
            return "its signs are not those of a rotation"
        if is_scaled:
            return "its tables are products, and not of one factor for both"
        for columns, wanted in self.given.values():
            if columns != wanted:
                return f"a table has {columns} columns, not {wanted}"
        return "the two elements of a pair are multiplied by different tables"


def _candidate_tables(tables: Sequence[Table]) -> list[list[Table]]:
    """Return the tables that may be the op's, with equal tables grouped.

    They have a number for each element or pair, or a matrix of 2 by 2 for each pair.
    """
    groups: dict[Any, list[Table]] = {}
    for table in tables:
        if table.inner in (1, 3):
            key = table.inner, table.elements.dtype, *table.elements.flatten().tolist()
            groups.setdefault(key, []).append(table)
    return list(groups.values())


def _occur_in(tables: Sequence[Tensor], factors: Tensor) -> bool:
    """Return whether every factor is, up to its sign, a number of one of these tables."""
    numbers = [torch.view_as_real(x) if x.is_complex() else x for x in tables]
    return bool(torch.isin(factors, torch.cat([x.abs().flatten() for x in numbers])).all())


@functools.lru_cache
def _pairings(width: int, R: int) -> dict[RopeOptions, Tensor]:
    """Return which elements the definition mixes if it rotates R of them, for each of its options.

    Options with which it does not take R elements are left out.
    """
    tables = {o: torch.ones((1, R // (1 + o.per_pair)), **_WIDE) for o in _OPTIONS}
    matrices = {o: _defined(width, o, table, table) for o, table in tables.items()}
    return {o: matrix != 0 for o, matrix in matrices.items() if matrix is not None}


def _defined(
    width: int, options: RopeOptions, cos: Tensor, sin: Tensor | None = None
) -> Tensor | None:
    """Return the matrix of the op's definition, or None if it does not take these tables."""
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
