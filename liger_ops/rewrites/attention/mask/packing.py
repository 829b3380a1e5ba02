"""Packed documents: a condition that a query sees a key only within its own document.

transformers numbers the documents of a row by position_ids, and shows a query the keys that have
its number:

    begins = diff(position_ids) != 1
    number = cumsum(begins)
    visible = number[b, i] == number[b, j] and ...

A running count of booleans never falls, so the tokens of a document are neighbours, and `begins`
says where each begins. Numbers that are an input prove nothing of the kind. Within a document
position_ids rise by 1 from token to token: position_ids[b, i] - position_ids[b, j] is i - j there.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import fx

from ...engine.canonical import arguments, is_tensor, operation, value
from ...engine.maps.algebra import (
    Affine,
    And,
    Condition,
    Datum,
    NonNegative,
    Not,
    Unknown,
    affine,
    always_true,
    at_least,
    conjunction,
    data_of,
    index,
    negation,
    same,
    substitute,
)
from .blocks import BATCH, KEYS, QUERIES
from .evaluate import Scope

KEY, QUERY = index(KEYS), index(QUERIES)


class Packing(NamedTuple):
    """The documents within which a condition shows keys to queries.

    Attributes:
        begins: the condition that token j of row b begins a document; the first of a row does too.
        within: what is asked of a query and a key of one document.
    """

    begins: Condition
    within: Condition


def packing(condition: Condition, scope: Scope) -> Packing | None:
    """Return the documents beyond which a condition shows no key; None without a proof."""
    parts = conjuncts(condition)
    for part in parts:
        if (number := _number_of_key(part)) is None:
            continue
        # Both orders: with one of them a query may see keys of other documents.
        is_number = [[_is(part, order) for part in parts] for order in _orders(number)]
        rest = [part for part, *found in zip(parts, *is_number, strict=True) if not any(found)]
        begins = _counted(number.node)
        if begins is None or not all(map(any, is_number)) or _reads(rest, number.node):
            continue
        if begins not in set(_home(number.node, scope).functions.nodes_read(number.node)):
            # Nobody then asked whether it is written after it was counted.
            continue
        is_first = affine(0, {}, {Datum(begins, (number.indices[0], KEY)): 1})
        rises = _rising(begins, number.indices[0], scope)
        within: Condition = True
        for part in rest:
            within = conjunction(within, _by_index(part, rises))
        return Packing(at_least(is_first, affine(1)), within)
    return None


def conjuncts(condition: Condition) -> list[Condition]:
    """Return the conditions that must all hold for `condition` to."""
    if isinstance(condition, And):
        return [*conjuncts(condition.left), *conjuncts(condition.right)]
    return [condition]


def _number_of_key(part: Condition) -> Datum | None:
    """Return x[b, j] if a part compares it with other numbers, for a matrix x; b may be fixed."""
    for datum in data_of(part) if isinstance(part, NonNegative) else ():
        if len(datum.indices) == 2 and same(datum.indices[1], KEY):
            row = datum.indices[0]
            if row.is_constant or same(row, index(BATCH)):
                return datum
    return None


def _orders(number: Datum) -> list[Affine]:
    """Return the differences of the numbers of a key and of a query, in both orders."""
    of_query = Datum(number.node, (number.indices[0], QUERY))
    difference = affine(0, {}, {number: 1, of_query: -1})
    return [difference, difference.times(-1)]


def _is(part: Condition, number: Affine) -> bool:
    """Return whether a part is the condition number >= 0."""
    return isinstance(part, NonNegative) and same(part.value, number)


def _reads(parts: list[Condition], node: fx.Node) -> bool:
    return any(datum.node is node for part in parts for datum in data_of(part))


def _counted(node: fx.Node) -> fx.Node | None:
    """Return the booleans that `node` counts along each row, or None if it counts none."""
    if operation(node) != "cumsum":
        return None
    given = dict(zip(("input", "dim"), arguments(node), strict=False)) | node.kwargs
    counted = given.pop("input")
    is_matrix = is_tensor(counted, 2) and value(counted).dtype == torch.bool
    return counted if is_matrix and given in ({"dim": -1}, {"dim": 1}) else None


def _is_int64(node: Any) -> bool:
    # Narrower numbers may pass their largest between two tokens.
    return is_tensor(node, 2) and value(node).dtype == torch.int64


def _home(node: fx.Node, scope: Scope) -> Scope:
    """Return the scope of a node, `scope` or one around it."""
    while node.graph is not scope.graph and scope.outer is not None:
        scope = scope.outer
    return scope


def _rising(begins: fx.Node, row: Affine, scope: Scope) -> Affine | None:
    """Return the difference, between a query and a key of a row, of numbers that rise by 1 from
    token to token unless the later one begins a document; None if there are none."""
    if operation(begins) != "ne" or len(begins.args) != 2 or begins.args[1] != 1:
        return None
    changes = begins.args[0]
    if not isinstance(changes, fx.Node) or operation(changes) != "diff":
        return None
    names = ("input", "n", "dim", "prepend", "append")
    given: dict[str, Any] = dict(zip(names, arguments(changes), strict=False))
    given |= changes.kwargs
    numbers, before = given["input"], given.get("prepend")
    # Of floating-point numbers a difference of 2 may be rounded to 1.
    is_of_neighbours = _is_int64(before) and always_true(value(before).shape[1] == 1)
    is_of_neighbours &= given.get("n", 1) == 1 and given.get("dim", -1) in (-1, 1)
    if not is_of_neighbours or given.get("append") is not None or not _is_int64(numbers):
        return None
    try:
        number = _home(begins, scope).functions.value(numbers)
    except Unknown:
        return None
    if not isinstance(number, Affine):
        return None
    at_query, at_key = (substitute(number, {-2: row, -1: place}) for place in (QUERY, KEY))
    return at_query - at_key


def _by_index(part: Condition, rises: Affine | None) -> Condition:
    """Return a condition on `rises` as one on i - j, which has the same value; others as they
    are."""
    if rises is None or isinstance(part, (bool, And)):
        return part
    if isinstance(part, Not):
        return negation(_by_index(part.operand, rises))
    for term, factor in rises.terms.items():
        if times := part.value.terms.get(term):
            by_index = part.value + (QUERY - KEY - rises).times(times * factor)
            return at_least(by_index, affine(0))
    return part
