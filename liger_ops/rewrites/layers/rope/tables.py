"""The tables of a rotation: which tensors they are computed from, and how their dimensions
correspond to those of x.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from ...engine.canonical import IDENTITY, canonical, is_tensor, same, value
from ...engine.graph_state import needed_by
from ...engine.insertion import Refused, View, derive
from ...engine.maps.index_maps import VIEWS
from ...engine.pattern import skip

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
