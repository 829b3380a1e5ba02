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
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from ...engine.canonical import IDENTITY, calls, canonical, is_tensor, same, same_number, value
from ...engine.pattern import Match, holds, skip
from .row_parts import OVERLOOKED, Term, common, joined_of, pairing_of, part_of, products, terms_of
from .same_tables import alike, unsigned

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
        self.op: str | None = op
        self.from_pairs = from_pairs

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
    # How it differs from the op's.
    difference: str | None = None


def _rotations(node: Any) -> Iterator[_Rotation]:
    joined = joined_of(node)
    if joined is None:
        yield from _by_elements(node)
        return
    pieces, interleaved, nodes = joined
    if not interleaved and len(pieces) > 1 and (passed := part_of(pieces[-1])) is not None:
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
    parts = [part_of(leaf) for leaf in rotation.leaves]
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
    node, passed = skip(node, OVERLOOKED)
    call = canonical(node)
    if call is None:
        return None
    if call.op == "cat" and call.args[1] == -1 and len(call.args[0]) == 2:
        parts = [part_of(piece) for piece in call.args[0]]
        pairing = pairing_of(*parts)
        if pairing is None or parts[0] is None or parts[1] is None:
            return None
        x = common([part.source for part in parts if part])[0]
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
    terms, nodes = terms_of(node)
    if len(terms) == 1:
        yield from _complex(node)
    if len(terms) != 2:
        return
    for straight, turning in (terms, terms[::-1]):
        for second in products(*turning):
            turned = _turned(second.factor)
            if turned is None:
                continue
            sign, interleaved, sources, turned_nodes = turned
            for first in products(*straight):
                if common([first.factor, *sources])[0] is None:
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
    node, passed = skip(node, OVERLOOKED)
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
    sums = [terms_of(piece) for piece in pieces]
    if any(len(terms) != 2 for terms, _ in sums):
        return
    ways = [[products(*term) for term in terms] for terms, _ in sums]
    for one, other in itertools.product((0, 1), repeat=2):
        rows = ways[0][one], ways[0][1 - one], ways[1][other], ways[1][1 - other]
        for terms in itertools.product(*rows):
            parts = [part_of(term.factor) for term in terms]
            if None in parts:
                continue
            a, b, b2, a2 = parts
            pairing = pairing_of(a, b)
            if pairing is None or pairing_of(a2, b2) is None or not same(a.bounds, a2.bounds):  # type: ignore[union-attr]
                continue
            sources = tuple(part.source for part in parts if part)
            if common(sources)[0] is None:
                continue
            interleaved, width = pairing
            signs = [
                _sign(term) * part.sign for term, part in zip(terms, parts, strict=True) if part
            ]
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
    terms: Sequence[Term], signs: Sequence[int], interleaved: bool, joins_interleaved: bool
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


def _sign(term: Term) -> int:
    """The sign of a product with the signs of its tables."""
    sign = term.sign
    for table in term.tables:
        sign *= unsigned(table)[1]
    return sign


def _turned(node: Any) -> tuple[int, bool, tuple[Any, ...], frozenset[fx.Node]] | None:
    """(-b, a) of x: the sign, whether pairs are interleaved, where x is read, and the nodes."""
    sign, nodes = 1, frozenset[fx.Node]()
    while (call := calls(skip(node, OVERLOOKED)[0], "neg")) is not None:
        below, passed = skip(node, OVERLOOKED)
        sign, nodes, node = -sign, nodes.union((*passed, below)), call.args[0]
    joined = joined_of(node)
    if joined is None or len(joined[0]) != 2:
        return None
    b, a = (part_of(piece) for piece in joined[0])
    pairing = pairing_of(a, b)
    if a is None or b is None or pairing is None or a.sign == b.sign or pairing[0] != joined[1]:
        return None
    if not same(pairing[1], value(a.source).shape[-1]):
        return None
    return sign * a.sign, joined[1], (a.source, b.source), nodes | joined[2] | a.nodes | b.nodes


def _match(root: fx.Node, rotation: _Rotation) -> Match | None:
    def keeps(x: fx.Node, passed: frozenset[fx.Node]) -> bool:
        dtypes = {value(root).dtype.to_real()}
        for node in rotation.nodes | passed:
            if (call := calls(node, "cast")) is not None:
                dtypes.add(call.args[1].to_real())
        return all(holds(dtype, value(x).dtype) for dtype in dtypes)

    x, nodes = common(rotation.leaves, keeps)
    nodes |= rotation.nodes
    tables = _tables(rotation)
    if x is None or tables is None:
        x = common(rotation.leaves)[0]
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
