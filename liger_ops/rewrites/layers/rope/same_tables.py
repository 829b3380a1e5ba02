"""Whether the tables of two rotations are the same, and what they are made of."""

from __future__ import annotations

from typing import Any

from torch import fx

from ...engine.canonical import IDENTITY, Call, calls, canonical, is_tensor, same
from ...engine.pattern import skip

# Operations of one table that give the same numbers from the same table.
REPEATED = {
    "cast", "contiguous", "cos", "expand", "getitem", "neg", "repeat_interleave", "sin", "slice",
    "squeeze", "transpose", "unsqueeze", "view", IDENTITY,
}  # fmt: skip


def alike(a: Any, b: Any) -> bool:
    """Whether two tables are the same, or made of the same in the same way."""
    a, b = (skip(one, {IDENTITY})[0] for one in (a, b))
    if a is b or not is_tensor(a) or not is_tensor(b):
        return same(a, b)
    x, y = repeated(a), repeated(b)
    if x is None or y is None or x.op != y.op or len(x.args) != len(y.args):
        return False
    return all(
        alike(p, q) if isinstance(p, fx.Node) and is_tensor(p) else same(p, q)
        for p, q in zip(x.args, y.args, strict=True)
    )


def repeated(node: Any) -> Call | None:
    """The call, of an operation that gives the same numbers from the same table."""
    call = canonical(node)
    return call if call is not None and call.op in REPEATED else None


def sources(table: Any) -> list[fx.Node]:
    """A table, and the nodes that it is made of by operations that give the same numbers again."""
    found: list[fx.Node] = []
    while isinstance(table, fx.Node):
        found.append(table)
        if (call := repeated(table)) is None:
            break
        found += call.through
        table = call.args[0]
        while isinstance(table, Call):
            table = table.args[0]
    return found


def unsigned(table: Any) -> tuple[Any, int, tuple[fx.Node, ...]]:
    """What a table is the negative of, the sign, and the nodes passed."""
    node, passed = skip(table, {IDENTITY})
    negated = calls(node, "neg")
    if negated is None or not is_tensor(negated.args[0]):
        return table, 1, ()
    inner, sign, more = unsigned(negated.args[0])
    return inner, -sign, (*passed, node, *more)
