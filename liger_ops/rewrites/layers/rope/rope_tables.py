"""Where the tables of a rotation stand beside the rotated tensor, and their form for the op."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ...engine.canonical import IDENTITY, calls, canonical, same, value
from ...engine.pattern import skip
from ...engine.rewrite import Refused, View, derive


@dataclass(frozen=True)
class Placement:
    """Which dimensions of x, counted as if it had four, are positions and the batch."""

    positions: int
    batch: int
    # How many dimensions the tables have after the elements of a row.
    inner: int
    # The dimension of heads, if the tables do not have it.
    missing: int | None
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

    def table(self, at: fx.Node, table: Any) -> Any:
        """A table without a dimension for the heads, inserted before `at`."""
        if not isinstance(table, fx.Node):
            return table
        table, dims = self._before_unsqueeze(table)
        for i in reversed(range(len(dims))):
            if dims[i] != self.positions and (dims[i] != self.batch or self.positions == 0):
                rows = len(dims) + 1 + self.inner
                table = derive(at, torch.squeeze, table, i - rows)
                del dims[i]
        return table

    def _before_unsqueeze(self, table: fx.Node) -> tuple[fx.Node, list[int]]:
        """The tensor of which `table` is a view with more dimensions of size 1, and which
        dimensions of x are those of that tensor."""
        dims = _leading(table, self.inner, self.missing)
        left = list(dims)
        node: Any = table
        while (call := calls(skip(node, {IDENTITY})[0], "unsqueeze")) is not None:
            # Dynamo's symbol of an argument that is a dimension is a constant.
            place = int(value(call.args[1]))
            place += len(left) + 1 + self.inner if place < 0 else 0
            if not 0 <= place < len(left) or left[place] == self.positions:
                break
            del left[place]
            node = call.args[0]
            if isinstance(node, fx.Node):
                table, dims = node, list(left)
        return table, dims


def placement(x: fx.Node, cos: fx.Node, inner: int, heads: int | None) -> Placement:
    """Where a table has its positions. `heads` is the dimension that the tables get later.

    Raises Refused for tables that differ between the heads, or are not of all positions.
    """
    sizes = tuple(value(x).shape)
    if len(sizes) not in (3, 4):
        raise Refused(f"the rotated tensor has {len(sizes)} dimensions, not 4")
    is_batched = len(sizes) == 4
    sizes = sizes[-4:-1] if is_batched else (1, *sizes[:-1])
    dims = _leading(cos, inner, heads)
    rows = [1, 1, 1]
    for dim, size in zip(dims, value(cos).shape, strict=False):
        rows[dim] = size
    for positions, other, batch in ((2, 1, 0), (1, 2, 0), (0, 2, 1)):
        ones = (rows[other],) if positions else (rows[1], rows[2])
        if all(same(one, 1) for one in ones) and same(rows[positions], sizes[positions]):
            return Placement(positions, batch, inner, heads, is_batched)
    raise Refused("its table is not one for all heads, with a number for each position")


def _leading(table: fx.Node, inner: int, missing: int | None) -> list[int]:
    """The dimensions of x, counted as if it had four, that stand beside those of a table."""
    count = value(table).dim() - 1 - inner
    dims = [dim for dim in (0, 1, 2) if dim != missing]
    if not 1 <= count <= len(dims):
        raise Refused(f"its table has {value(table).dim()} dimensions")
    return dims[-count:]


def expanded(table: Any) -> Any:
    """A table before it is expanded to the size of x, which a product does anyway."""
    while isinstance(table, fx.Node) and (call := canonical(table)) is not None:
        source = call.args[0] if call.op in ("expand", IDENTITY) else None
        if not isinstance(source, fx.Node) or value(source).dim() != value(table).dim():
            break
        table = source
    return table
