"""The tables of a rotation: what they are made of, and where they stand beside x."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from ...engine.canonical import IDENTITY, canonical, is_tensor, same, value
from ...engine.graph_state import needed_by
from ...engine.pattern import skip
from ...engine.rewrite import Refused, View, derive

# Operations that give the same numbers from the same tables.
_REPEATED = {
    "cast", "chunk", "contiguous", "cos", "expand", "getitem", "item", "neg", "repeat_interleave",
    "sin", "slice", "split", "squeeze", "stack", "transpose", "unbind", "unsqueeze", "view",
    IDENTITY,
}  # fmt: skip


class Table(NamedTuple):
    """A tensor that x is multiplied by, or one that it is made of.

    `dims` are the dimensions of x that its positions have, counted as if x had four; `inner` is the
    number of dimensions after them, and `elements` has numbers for these.
    """

    node: fx.Node
    dims: tuple[int, ...]
    inner: int
    elements: Tensor


def alike(a: Any, b: Any) -> bool:
    """Whether two tables are the same, or made of the same in the same way."""
    a, b = (skip(one, {IDENTITY})[0] for one in (a, b))
    if a is b or not is_tensor(a) or not is_tensor(b):
        return same(a, b)
    x, y = canonical(a), canonical(b)
    if not is_repeated(a) or x is None or y is None or x.op != y.op or len(x.args) != len(y.args):
        return False
    return all(
        alike(p, q) if isinstance(p, fx.Node) and is_tensor(p) else same(p, q)
        for p, q in zip(x.args, y.args, strict=True)
    )


def is_repeated(node: Any) -> bool:
    """Whether it gives the same numbers from the same tables."""
    call = canonical(node)
    return call is not None and call.op in _REPEATED


def made_of(tables: Iterable[fx.Node]) -> set[fx.Node]:
    """Tables, and the nodes that they are made of by operations that give the same again."""
    return needed_by(*tables, end=lambda one: not is_repeated(one))


@dataclass(frozen=True)
class Placement:
    """Which dimensions of x, counted as if it had four, are positions and the batch."""

    positions: int
    batch: int
    is_batched: bool

    def views(self) -> tuple[list[View], list[View]]:
        """The views from x to (B, heads, S, D), and those from the op's result back."""
        there: list[View] = [] if self.is_batched else [(torch.unsqueeze, 0)]
        back: list[View] = [] if self.is_batched else [(torch.squeeze, 0)]
        if self.positions == 1:
            there, back = [*there, (torch.transpose, 1, 2)], [(torch.transpose, 1, 2), *back]
        elif self.positions == 0:
            there, back = [*there, (torch.permute, (1, 2, 0, 3))], [(torch.permute, (2, 0, 1, 3))]
        return there, back

    def table(self, at: fx.Node, tables: list[Table]) -> fx.Node:
        """One of these tables without a dimension for the heads, inserted before `at`."""
        table = next((one for one in tables if self.positions in one.dims), tables[-1])
        node = table.node
        for i, dim in reversed(list(enumerate(table.dims))):
            if dim != self.positions and (dim != self.batch or self.positions == 0):
                node = derive(at, torch.squeeze, node, i - value(node).dim())
        return node


def placement(x: fx.Node, cos: Table) -> Placement:
    """Where a table has its positions.

    Raises Refused for tables that differ between the heads, or are not of all positions.
    """
    sizes = tuple(value(x).shape)
    if len(sizes) not in (3, 4):
        raise Refused(f"the rotated tensor has {len(sizes)} dimensions, not 4")
    is_batched = len(sizes) == 4
    sizes = sizes[-4:-1] if is_batched else (1, *sizes[:-1])
    rows = [1, 1, 1]
    for dim, size in zip(cos.dims, value(cos.node).shape, strict=False):
        rows[dim] = size
    for positions, other, batch in ((2, 1, 0), (1, 2, 0), (0, 2, 1)):
        ones = (rows[other],) if positions else (rows[1], rows[2])
        if all(same(one, 1) for one in ones) and same(rows[positions], sizes[positions]):
            return Placement(positions, batch, is_batched)
    raise Refused("its table is not one for all heads, with a number for each position")
