"""Sums, products, joined rows and slices, read from a graph without regard to casts and copies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx

from ...engine.canonical import IDENTITY, calls, canonical, is_tensor, same, value
from ...engine.pattern import skip

# Copies and casts: the op computes in float32 and rounds once, wherever the code rounds.
OVERLOOKED = {"cast", "contiguous", IDENTITY}


@dataclass(frozen=True)
class Term:
    """A product in a sum: its sign, one factor, and the others."""

    sign: int
    factor: Any
    tables: tuple[Any, ...]
    nodes: frozenset[fx.Node]


@dataclass(frozen=True)
class Part:
    """x[..., start:stop:step]."""

    source: Any
    bounds: tuple[Any, ...]
    nodes: frozenset[fx.Node]
    sign: int = field(default=1)


def terms_of(node: Any, sign: int = 1) -> tuple[list[tuple[int, Any]], frozenset[fx.Node]]:
    """The terms of a sum with their signs, and the nodes that add them."""
    below, passed = skip(node, OVERLOOKED)
    call = canonical(below)
    if call is None or call.op not in ("add", "sub", "neg") or not is_tensor(below):
        return [(sign, node)], frozenset()
    terms, nodes = [], frozenset((*passed, below, *call.through))
    for i, argument in enumerate(call.args):
        is_negative = call.op == "neg" or (call.op == "sub" and i == 1)
        more, passing = terms_of(argument, -sign if is_negative else sign)
        terms += more
        nodes |= passing
        # No rotation has more terms, and a sum of many is not read to its end.
        if len(terms) > 2:
            break
    return terms, nodes


def products(sign: int, node: Any) -> list[Term]:
    """Each way to take one factor of a product."""
    below, passed = skip(node, OVERLOOKED)
    call = calls(below, "mul")
    if call is None or not is_tensor(below):
        return []
    nodes = frozenset((*passed, below, *call.through))
    found = []
    for a, b in (call.args, call.args[::-1]):
        tables = () if same(b, 1) else (b,)
        if is_tensor(a) and (not tables or isinstance(b, fx.Node)):
            if tables:
                found.append(Term(sign, a, tables, nodes))
            for term in products(sign, a):
                found.append(
                    replace(term, tables=(*term.tables, *tables), nodes=term.nodes | nodes)
                )
    return found


def joined_of(node: Any) -> tuple[tuple[Any, ...], bool, frozenset[fx.Node]] | None:
    """The pieces of a row, whether they are interleaved, and the nodes that join them."""
    node, passed = skip(node, OVERLOOKED)
    call = canonical(node)
    if call is None:
        return None
    if call.op == "cat":
        return (call.args[0], False, frozenset((*passed, node))) if call.args[1] == -1 else None
    if call.op not in ("flatten", "view"):
        return None
    below, more = skip(call.args[0], OVERLOOKED)
    stack = calls(below, "stack")
    if stack is None or stack.args[1] != -1:
        return None
    if not same(tuple(value(node).shape[:-1]), tuple(value(below).shape[:-2])):
        return None
    return stack.args[0], True, frozenset((*passed, node, *more, below))


def part_of(node: Any) -> Part | None:
    sign, nodes = 1, frozenset[fx.Node]()
    while True:
        node, passed = skip(node, OVERLOOKED)
        call = canonical(node)
        if call is None or call.op not in ("neg", "slice"):
            return None
        nodes |= frozenset((*passed, node, *call.through))
        if call.op == "slice":
            break
        sign, node = -sign, call.args[0]
    source, dim, *bounds = call.args
    return Part(source, tuple(map(value, bounds)), nodes, sign) if dim == -1 else None


def pairing_of(a: Part | None, b: Part | None) -> tuple[bool, Any] | None:
    """Whether two parts are of interleaved pairs, instead of halves, and how wide both are; None
    for parts that are no pairs."""
    if a is None or b is None:
        return None
    (start, half, step), (start_b, width, step_b) = a.bounds, b.bounds
    if not same(start, 0) or not same(step, step_b):
        return None
    if same(step, 2):
        return (True, width) if same(start_b, 1) and same(half, width) else None
    halves = same(2 * half, width) or (not isinstance(width, int) and same(half, width // 2))
    return (False, width) if same(step, 1) and same(start_b, half) and halves else None


def chain(node: Any) -> list[tuple[fx.Node, frozenset[fx.Node]]]:
    """`node` and what it is a cast or copy of, each with the nodes passed."""
    found, passed = [], frozenset[fx.Node]()
    while isinstance(node, fx.Node):
        node, skipped = skip(node, {IDENTITY})
        passed = passed.union(skipped)
        found.append((node, passed))
        call = canonical(node)
        if call is None or call.op not in ("cast", "contiguous"):
            break
        passed, node = passed | {node}, call.args[0]
    return found


def common(leaves: Sequence[Any], wanted: Any = None) -> tuple[Any, frozenset[fx.Node]]:
    """The first tensor that all leaves are a cast or copy of, and the nodes passed.

    `wanted(node, passed)` may exclude one.
    """
    first, *others = (chain(leaf) for leaf in leaves)
    for node, passed in first:
        more = [through for chain in others for one, through in chain if one is node]
        nodes = passed.union(*more)
        if len(more) == len(others) and (wanted is None or wanted(node, nodes)):
            return node, nodes
    return None, frozenset()
