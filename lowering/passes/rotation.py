"""Reads a rotation of pairs from the operations that compute it, in whichever order they stand.

A rotation turns pairs (a, b) of the first R elements of a head: y = (a cos - b sin, b cos + a sin).
Models write it by elements, `x * cos + turned(x) * sin` with turned(x) = (-b, a), or by pairs, with
y joined from its two sums. The reader follows the code from the joined pieces or the sum to the
slices of x; signs may be at any factor, factors and terms in any order, and tables are whatever x
or a part of x is multiplied by.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from .canonical import IDENTITY, Call, calls, canonical, is_tensor, same, same_number, value
from .pattern import Match, holds, skip

# Copies and casts: the op computes in float32 and rounds once, wherever the code rounds.
_OVERLOOKED = {"cast", "contiguous", IDENTITY}
# Operations of one table that give the same numbers from the same table.
_REPEATED = {
    "cast", "contiguous", "cos", "expand", "getitem", "neg", "repeat_interleave", "sin", "slice", "squeeze", "transpose",
    "unsqueeze", "view", IDENTITY,
}  # fmt: skip
# The op's complex tables have pairs, too, and rotate interleaved pairs.
_COMPLEX = "complex"


@dataclass(frozen=True)
class Form:
    """How a spelling pairs elements, and the layout of its tables."""

    interleaved: bool = False
    per_pair: bool = False
    # Whether it rotates in the other direction, by -sin.
    back: bool = False
    # How many dimensions its tables have after the elements of a row.
    inner: int = 0
    # Whether it writes interleaved pairs in halves.
    deinterleave: bool = False


class Reader:
    """Matches the rotations whose last operation is `op`, as a `Pattern` does.

    A match has the values x, cos and sin, and scale if both tables are multiplied by one; its form
    is the value "form". With `from_pairs` x is brought from interleaved pairs into halves first.
    """

    OPS = ("add", "sub", "cat", "flatten", "view")

    def __init__(self, op: str, from_pairs: bool) -> None:
        self.op, self.from_pairs = op, from_pairs

    def match(self, node: fx.Node) -> Match | None:
        close: Match | None = None
        for found in _rotations(node):
            rotation = _from_pairs(found) if self.from_pairs else found
            match = None if rotation is None else _match(node, rotation)
            if match is not None and match.difference is None:
                return match
            close = close or match
        return close


@dataclass(frozen=True)
class _Rotation:
    form: Form
    # Where the code reads x: it is one of the tensors that each of these is a cast or a copy of.
    leaves: tuple[Any, ...]
    # The factors of each product other than x, of cos and of sin.
    cos: tuple[Any, ...]
    sin: tuple[Any, ...]
    nodes: frozenset[fx.Node]
    # How many of x's elements are rotated.
    width: Any
    # Views and signs of tables, which the op's tables do not need.
    difference: str | None = None


@dataclass(frozen=True)
class _Term:
    """A product in a sum: its sign, one factor, and the others."""

    sign: int
    factor: Any
    tables: tuple[Any, ...]
    nodes: frozenset[fx.Node]


@dataclass(frozen=True)
class _Part:
    """x[..., start:stop:step]."""

    source: Any
    bounds: tuple[Any, ...]
    nodes: frozenset[fx.Node]
    sign: int = field(default=1)


def _rotations(node: Any) -> Iterator[_Rotation]:
    joined = _joined(node)
    if joined is None:
        yield from _by_elements(node)
        return
    pieces, interleaved, nodes = joined
    if not interleaved and len(pieces) > 1 and (passed := _part(pieces[-1])) is not None:
        bounds = (value(passed.source).shape[-1], 1)
        if len(pieces) == 2:
            inner: Iterator[_Rotation] = _rotations(pieces[0])
            inner = (one for found in inner if (one := _of_part(found)) is not None)
        else:
            inner = _by_pairs(pieces[:-1], interleaved)
        for rotation in inner:
            if passed.sign > 0 and same(passed.bounds, (rotation.width, *bounds)):
                yield replace(
                    rotation,
                    leaves=(*rotation.leaves, passed.source),
                    nodes=rotation.nodes | nodes | passed.nodes,
                )
    for rotation in _by_pairs(pieces, interleaved):
        # The elements that are not rotated would be missing.
        if same(rotation.width, value(rotation.leaves[0]).shape[-1]):
            yield replace(rotation, nodes=rotation.nodes | nodes)


def _of_part(rotation: _Rotation) -> _Rotation | None:
    """The rotation of the first elements of a head, as one of the head."""
    parts = [_part(leaf) for leaf in rotation.leaves]
    wanted = (0, rotation.width, 1)
    if not all(part and part.sign > 0 and same(part.bounds, wanted) for part in parts):
        return None
    nodes = rotation.nodes.union(*(part.nodes for part in parts if part))
    return replace(rotation, leaves=tuple(part.source for part in parts if part), nodes=nodes)


def _from_pairs(rotation: _Rotation) -> _Rotation | None:
    """The rotation of halves that were made of interleaved pairs, as one of these pairs."""
    if rotation.form.interleaved or rotation.form.per_pair:
        return None
    found = [_in_halves(leaf) for leaf in rotation.leaves]
    if None in found:
        return None
    form = replace(rotation.form, interleaved=True, deinterleave=True)
    nodes = rotation.nodes.union(*(one[1] for one in found if one))
    return replace(rotation, form=form, leaves=tuple(one[0] for one in found if one), nodes=nodes)


def _in_halves(node: Any) -> tuple[Any, frozenset[fx.Node]] | None:
    """x, of which `node` has the elements at even positions first, and then those at odd ones."""
    node, passed = skip(node, _OVERLOOKED)
    call = canonical(node)
    if call is None:
        return None
    if call.op == "cat" and call.args[1] == -1 and len(call.args[0]) == 2:
        parts = [_part(piece) for piece in call.args[0]]
        pairing = _pairing(*parts)
        if pairing is None or parts[0] is None or parts[1] is None:
            return None
        x = _common([part.source for part in parts if part])[0]
        if x is None or pairing != (True, value(x).shape[-1]) or parts[0].sign + parts[1].sign < 2:
            return None
        return x, frozenset((*passed, node)) | parts[0].nodes | parts[1].nodes
    turned = calls(call.args[0], "transpose") if call.op == "view" else None
    viewed = calls(turned.args[0], "view") if turned and turned.args[1] == (-2, -1) else None
    if turned is None or viewed is None:
        return None
    x, size = viewed.args[0], value(node).shape[-1]
    shapes = [tuple(value(one).shape) for one in (x, turned.args[0], node)]
    if not same(shapes[0], shapes[2]) or not same(shapes[1], (*shapes[0][:-1], size // 2, 2)):
        return None
    return x, frozenset((*passed, node, call.args[0], turned.args[0]))


def _by_elements(node: Any) -> Iterator[_Rotation]:
    """x * cos + turned(x) * sin, and the product of complex numbers."""
    terms, nodes = _terms(node)
    if len(terms) == 1:
        yield from _complex(node)
    if len(terms) != 2:
        return
    for straight, turning in (terms, terms[::-1]):
        for second in _products(*turning):
            turned = _turned(second.factor)
            if turned is None:
                continue
            sign, interleaved, sources, turned_nodes = turned
            for first in _products(*straight):
                if _common([first.factor, *sources])[0] is None:
                    continue
                signs = _sign(first), sign * _sign(second)
                yield _Rotation(
                    Form(interleaved, back=signs[1] < 0),
                    (first.factor, *sources),
                    first.tables,
                    second.tables,
                    nodes | turned_nodes | first.nodes | second.nodes,
                    value(first.factor).shape[-1],
                    None if signs[0] > 0 else "its signs are not those of a rotation",
                )


def _complex(node: Any) -> Iterator[_Rotation]:
    """view_as_real(view_as_complex(pairs of x) * cos), flattened."""
    node, passed = skip(node, _OVERLOOKED)
    call = canonical(node)
    if call is None or call.op not in ("flatten", "view"):
        return
    numbers = calls(call.args[0], "view_as_real")
    product = calls(numbers.args[0], "mul") if numbers else None
    if numbers is None or product is None:
        return
    for a, b in (product.args, product.args[::-1]):
        pairs = calls(a, "view_as_complex")
        viewed = calls(pairs.args[0], "view") if pairs else None
        if pairs is None or viewed is None or not is_tensor(b):
            continue
        x = viewed.args[0]
        shape = tuple(value(x).shape)
        if same(tuple(value(pairs.args[0]).shape), (*shape[:-1], shape[-1] // 2, 2)):
            nodes = (node, call.args[0], numbers.args[0], a, pairs.args[0], *passed)
            form = Form(True, True)
            yield _Rotation(form, (x,), (b,), (_COMPLEX,), frozenset(nodes), shape[-1])


def _by_pairs(pieces: Sequence[Any], joins_interleaved: bool) -> Iterator[_Rotation]:
    """a * cos - b * sin and b * cos + a * sin, joined."""
    if len(pieces) != 2:
        return
    sums = [_terms(piece) for piece in pieces]
    if any(len(terms) != 2 for terms, _ in sums):
        return
    ways = [[_products(*term) for term in terms] for terms, _ in sums]
    for one, other in itertools.product((0, 1), repeat=2):
        rows = ways[0][one], ways[0][1 - one], ways[1][other], ways[1][1 - other]
        for terms in itertools.product(*rows):
            parts = [_part(term.factor) for term in terms]
            if None in parts:
                continue
            a, b, b2, a2 = parts
            pairing = _pairing(a, b)
            if pairing is None or _pairing(a2, b2) is None or not same(a.bounds, a2.bounds):  # type: ignore[union-attr]
                continue
            sources = tuple(part.source for part in parts if part)
            if _common(sources)[0] is None:
                continue
            interleaved, width = pairing
            signs = [_sign(term) * part.sign for term, part in zip(terms, parts, strict=True) if part]
            nodes = sums[0][1].union(sums[1][1], *(one.nodes for one in (*terms, *parts) if one))
            yield _Rotation(
                Form(interleaved, True, signs[1] > 0, 0, interleaved and not joins_interleaved),
                sources,
                terms[0].tables,
                terms[1].tables,
                nodes,
                width,
                _difference(terms, signs, interleaved, joins_interleaved),
            )


def _difference(
    terms: Sequence[_Term], signs: Sequence[int], interleaved: bool, joins_interleaved: bool
) -> str | None:
    cos, sin, other_cos, other_sin = (term.tables for term in terms)
    if signs[0] < 0 or signs[2] < 0 or signs[1] == signs[3]:
        return "its signs are not those of a rotation"
    if not _same_factors(cos, other_cos) or not _same_factors(sin, other_sin):
        return "the two elements of a pair are multiplied by different tables"
    if joins_interleaved and not interleaved:
        return "it reads pairs in halves and writes them interleaved"
    return None


def _same_factors(a: Sequence[Any], b: Sequence[Any]) -> bool:
    return len(a) == len(b) and all(
        alike(unsigned(x)[0], unsigned(y)[0]) for x, y in zip(a, b, strict=True)
    )


def _sign(term: _Term) -> int:
    """The sign of a product with the signs of its tables."""
    sign = term.sign
    for table in term.tables:
        sign *= unsigned(table)[1]
    return sign


def unsigned(table: Any) -> tuple[Any, int, tuple[fx.Node, ...]]:
    """What a table is the negative of, the sign, and the nodes passed."""
    node, passed = skip(table, {IDENTITY})
    negated = calls(node, "neg")
    if negated is None or not is_tensor(negated.args[0]):
        return table, 1, ()
    inner, sign, more = unsigned(negated.args[0])
    return inner, -sign, (*passed, node, *more)


def _terms(node: Any, sign: int = 1) -> tuple[list[tuple[int, Any]], frozenset[fx.Node]]:
    """The terms of a sum with their signs, and the nodes that add them."""
    below, passed = skip(node, _OVERLOOKED)
    call = canonical(below)
    if call is None or call.op not in ("add", "sub", "neg") or not is_tensor(below):
        return [(sign, node)], frozenset()
    terms, nodes = [], frozenset((*passed, below, *call.through))
    for i, argument in enumerate(call.args):
        is_negative = call.op == "neg" or (call.op == "sub" and i == 1)
        more, passing = _terms(argument, -sign if is_negative else sign)
        terms += more
        nodes |= passing
        # No rotation has more terms, and a sum of many is not read to its end.
        if len(terms) > 2:
            break
    return terms, nodes


def _products(sign: int, node: Any) -> list[_Term]:
    """Each way to take one factor of a product."""
    below, passed = skip(node, _OVERLOOKED)
    call = calls(below, "mul")
    if call is None or not is_tensor(below):
        return []
    nodes = frozenset((*passed, below, *call.through))
    found = []
    for a, b in (call.args, call.args[::-1]):
        tables = () if same(b, 1) else (b,)
        if is_tensor(a) and (not tables or isinstance(b, fx.Node)):
            if tables:
                found.append(_Term(sign, a, tables, nodes))
            for term in _products(sign, a):
                found.append(replace(term, tables=(*term.tables, *tables), nodes=term.nodes | nodes))
    return found


def _turned(node: Any) -> tuple[int, bool, tuple[Any, ...], frozenset[fx.Node]] | None:
    """(-b, a) of x: the sign, whether pairs are interleaved, where x is read, and the nodes."""
    sign, nodes = 1, frozenset[fx.Node]()
    while (call := calls(skip(node, _OVERLOOKED)[0], "neg")) is not None:
        below, passed = skip(node, _OVERLOOKED)
        sign, nodes, node = -sign, nodes.union((*passed, below)), call.args[0]
    joined = _joined(node)
    if joined is None or len(joined[0]) != 2:
        return None
    b, a = (_part(piece) for piece in joined[0])
    pairing = _pairing(a, b)
    if a is None or b is None or pairing is None or a.sign == b.sign or pairing[0] != joined[1]:
        return None
    if not same(pairing[1], value(a.source).shape[-1]):
        return None
    return sign * a.sign, joined[1], (a.source, b.source), nodes | joined[2] | a.nodes | b.nodes


def _joined(node: Any) -> tuple[tuple[Any, ...], bool, frozenset[fx.Node]] | None:
    """The pieces of a row, whether they are interleaved, and the nodes that join them."""
    node, passed = skip(node, _OVERLOOKED)
    call = canonical(node)
    if call is None:
        return None
    if call.op == "cat":
        return (call.args[0], False, frozenset((*passed, node))) if call.args[1] == -1 else None
    if call.op not in ("flatten", "view"):
        return None
    below, more = skip(call.args[0], _OVERLOOKED)
    stack = calls(below, "stack")
    if stack is None or stack.args[1] != -1:
        return None
    if not same(tuple(value(node).shape[:-1]), tuple(value(below).shape[:-2])):
        return None
    return stack.args[0], True, frozenset((*passed, node, *more, below))


def _part(node: Any) -> _Part | None:
    sign, nodes = 1, frozenset[fx.Node]()
    while True:
        node, passed = skip(node, _OVERLOOKED)
        call = canonical(node)
        if call is None or call.op not in ("neg", "slice"):
            return None
        nodes |= frozenset((*passed, node, *call.through))
        if call.op == "slice":
            break
        sign, node = -sign, call.args[0]
    source, dim, *bounds = call.args
    return _Part(source, tuple(map(value, bounds)), nodes, sign) if dim == -1 else None


def _pairing(a: _Part | None, b: _Part | None) -> tuple[bool, Any] | None:
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


def _chain(node: Any) -> list[tuple[fx.Node, frozenset[fx.Node]]]:
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


def _common(leaves: Sequence[Any], wanted: Any = None) -> tuple[Any, frozenset[fx.Node]]:
    """The first tensor that all leaves are a cast or copy of, and the nodes passed.

    `wanted(node, passed)` may exclude one.
    """
    first, *others = (_chain(leaf) for leaf in leaves)
    for node, passed in first:
        more = [through for chain in others for one, through in chain if one is node]
        nodes = passed.union(*more)
        if len(more) == len(others) and (wanted is None or wanted(node, nodes)):
            return node, nodes
    return None, frozenset()


def _match(root: fx.Node, rotation: _Rotation) -> Match | None:
    def keeps(x: fx.Node, passed: frozenset[fx.Node]) -> bool:
        dtypes = {value(root).dtype}
        for node in rotation.nodes | passed:
            if (call := calls(node, "cast")) is not None:
                dtypes.add(call.args[1])
        # Complex numbers are made of x in float32 or float64.
        dtypes = {one for one in dtypes if not one.is_complex}
        return all(holds(dtype, value(x).dtype) for dtype in dtypes)

    x, nodes = _common(rotation.leaves, keeps)
    nodes |= rotation.nodes
    tables = _tables(rotation)
    if x is None or tables is None:
        x = _common(rotation.leaves)[0]
        reason = rotation.difference or (
            "a value on the way is rounded to a narrower dtype than that of the rotated tensor"
            if tables is not None
            else "its tables are products, and not of one factor for both"
        )
        return None if x is None else Match(root, {"x": x}, frozenset(nodes), reason)
    form, cos, sin, scale = tables
    values = {"x": x, "cos": cos, "sin": sin, "scale": scale, "form": form}
    values["given"] = (*rotation.cos, *rotation.sin)
    values = {name: one for name, one in values.items() if one is not None}
    return Match(root, values, nodes, rotation.difference or _width(rotation, form, cos, sin))


def _width(rotation: _Rotation, form: Form, cos: Any, sin: Any) -> str | None:
    """Reason that the tables are not of the rotated elements, or None. A table of one column would
    be broadcast."""
    for table in (cos, sin):
        columns = rotation.width // 2 if form.per_pair else rotation.width
        found = columns if table is None else value(table).shape[-1]
        if not same(found, columns) and not same_number(found, columns):
            return f"a table has {found} columns, not {columns}"
    return None


def _tables(rotation: _Rotation) -> tuple[Form, Any, Any, Any] | None:
    """The form, and the tables of cos and sin without their signs, and a factor of both."""
    form = rotation.form
    if rotation.sin == (_COMPLEX,):
        return form, rotation.cos[0], None, None
    cos, sin = ([unsigned(one)[0] for one in tables] for tables in (rotation.cos, rotation.sin))
    scale = None
    if len(cos) == len(sin) == 2:
        pairs = [(i, j) for i in (0, 1) for j in (0, 1) if alike(cos[i], sin[j])]
        if len(pairs) != 1:
            return None
        (i, j) = pairs[0]
        scale, cos, sin = cos[i], [cos[1 - i]], [sin[1 - j]]
    if len(cos) != 1 or len(sin) != 1 or not all(is_tensor(one) for one in (*cos, *sin)):
        return None
    pairs_of = [_number_per_pair(one) for one in (*cos, *sin)]
    if form.interleaved and not form.per_pair and None not in pairs_of and scale is None:
        return replace(form, per_pair=True), *pairs_of, None
    return form, cos[0], sin[0], scale


def _number_per_pair(table: Any) -> Any:
    """The table of which each number is repeated for the two elements of an interleaved pair."""
    repeated = calls(skip(table, {IDENTITY})[0], "repeat_interleave")
    return repeated.args[0] if repeated and same(repeated.args[1:], (2, -1)) else None


def alike(a: Any, b: Any) -> bool:
    """Whether two tables are the same, or made of the same in the same way."""
    a, b = (skip(one, {IDENTITY})[0] for one in (a, b))
    if a is b or not is_tensor(a) or not is_tensor(b):
        return same(a, b)
    x, y = canonical(a), canonical(b)
    if x is None or y is None or x.op != y.op or x.op not in _REPEATED or len(x.args) != len(y.args):
        return False
    return all(
        alike(p, q) if isinstance(p, fx.Node) and is_tensor(p) else same(p, q)
        for p, q in zip(x.args, y.args, strict=True)
    )


def is_repeated(node: fx.Node) -> bool:
    call = canonical(node)
    return call is not None and call.op in _REPEATED


def sources(table: Any) -> list[fx.Node]:
    """A table, and the nodes that it is made of by operations that give the same numbers again."""
    found: list[fx.Node] = []
    while isinstance(table, fx.Node):
        found.append(table)
        if not is_repeated(table):
            break
        call = canonical(table)
        found += call.through
        table = call.args[0]
        while isinstance(table, Call):
            table = table.args[0]
    return found
