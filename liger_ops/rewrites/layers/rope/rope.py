"""Rotary position embedding of queries and keys, as models write it.

A match is the rotation of one tensor; two rotations with the same tables become one op.
The op computes in float32 and rounds once, wherever the code rounds.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from ...engine.canonical import IDENTITY, calls, canonical, is_tensor, same, value
from ...engine.pattern import CHEAP, Match
from ...engine.report import Report
from ...engine.rewrite import Refused, Search, attempt, derive, emit, items, viewed
from .rotation import TABLES, Options, Reader, Rotation
from .tables import alike, is_repeated, made_of, placement


def rewrite(graph: fx.Graph, report: Report) -> None:
    search = Search(graph, report, "rope")
    waiting: list[Match] = []
    alone: list[Match] = []
    for match, _ in search.matches([(Reader(op), None) for op in Reader.OPS]):
        search.set_aside(match)
        later = next((one for one in waiting if _is_pair(one, match)), None)
        if later is None:
            waiting.append(match)
            continue
        # Matches come from the end of the graph, so the first one found is the later one.
        waiting.remove(later)
        try:
            with attempt(search.graph):
                _put((match, later), _place(match, later, search), search)
        except Refused:
            alone += [later, match]
    for match in [*alone, *waiting]:
        try:
            with attempt(search.graph):
                _put((match,), match.root, search)
        except Refused as refused:
            search.refuse(match, str(refused))
    search.finish()


def _is_pair(a: Match, b: Match) -> bool:
    tables = [[one.values.get(name) for name in TABLES] for one in (a, b)]
    return a["rotation"].options == b["rotation"].options and all(map(alike, *tables))


def _put(matches: tuple[Match, ...], at: fx.Node, search: Search) -> None:
    """Replace the rotations of one tensor or two by one op, inserted before `at`."""
    rotation: Rotation = matches[0]["rotation"]
    options = rotation.options
    places = [placement(match["x"], match["rotation"].cos[0]) for match in matches]
    if places[-1] != places[0]:
        raise Refused("queries and keys have their heads at different dimensions")
    _check_tables(matches, search)
    there, back = places[0].views()
    before = search.state.order[at]
    tensors = [viewed(at, _as_result(at, match, before, search), there) for match in matches]
    if len(tensors) == 1:
        # The op takes two tensors; the second has no heads, so nothing is computed for it.
        none = derive(at, torch.Tensor.detach, tensors[0])
        tensors.append(derive(at, torch.narrow, none, 1, 0, 0))
    tables: list[Any] = [one and places[0].table(at, one) for one in rotation[1:3]]
    if rotation.scale is not None:
        scale = places[0].table(at, rotation.scale)
        tables = [derive(at, torch.mul, derive(at, torch.Tensor.float, t), scale) for t in tables]
    if options.back:
        tables[1] = derive(at, torch.neg, tables[1])
    given = (node for match in matches for node in match["given"])
    passed = set(filter(is_repeated, made_of(given)))
    sections = None
    if (parts := _sections(tables, options)) is not None:
        *tables, sections, combined = parts
        passed |= combined
    # Views of tables that nothing else uses are erased with the match.
    matches = tuple(replace(match, nodes=match.nodes | passed) for match in matches)
    args: tuple[Any, ...] = (*tensors, *tables, options.interleaved, options.per_pair)
    if options.deinterleave:
        args = (*args, None, True)
    elif sections is not None:
        args = (*args, sections)
    with search.state.modes_of(at):
        op = emit(at, torch.ops.liger.rope.default, args)
    # The op's results have the strides of x; those of torch.cat do not.
    results = [viewed(at, new, back) for new in items(op, len(matches))]
    search.replace(*zip(matches, results, strict=True))
    search.used(op)


def _sections(tables: list[Any], options: Options) -> tuple[Any, ...] | None:
    """If both tables are combined from three each, as multimodal models do: the tables of three,
    the sections, and the nodes that combine them; None otherwise."""
    if options != Options():
        return None
    parts = [_combined(table) for table in tables]
    if parts[0] is None or parts[1] is None or parts[0][1] != parts[1][1]:
        return None
    return parts[0][0], parts[1][0], parts[0][1], parts[0][2] | parts[1][2]


def _combined(table: fx.Node) -> tuple[fx.Node, list[int], frozenset[fx.Node]] | None:
    """The tables (3, B, S, R) that `table` has its columns from, by turns, and the widths."""
    joined = calls(table, "cat")
    if joined is None or joined.args[1] != -1 or len(joined.args[0]) != 6:
        return None
    source: Any = None
    widths, position, nodes = [], 0, {table}
    for i, piece in enumerate(joined.args[0]):
        item = calls(piece, "getitem")
        part = item and calls(item.args[0], "slice")
        if not item or not part or not same(item.args[1], (i % 3, *[slice(None)] * 3)):
            return None
        width = value(piece).shape[-1]
        source = source or part.args[0]
        columns = (-1, position, position + width, 1)
        if part.args[0] is not source or not same(part.args[1:], columns):
            return None
        widths.append(width)
        position += width
        nodes |= {piece, item.args[0], *part.through}
    if not same(tuple(value(source).shape[::3]), (3, position)) or widths[:3] != widths[3:]:
        return None
    return source, widths[:3], frozenset(nodes)


def _as_result(at: fx.Node, match: Match, before: int, search: Search) -> fx.Node:
    """x in the result's dtype, which under autocast is wider if the tables are."""
    x, dtype = match["x"], value(match.root).dtype
    x = _computed(at, x, _later_views(x, at, before, search))
    return x if value(x).dtype == dtype else derive(at, torch.Tensor.to, x, dtype)


def _later_views(x: fx.Node, at: fx.Node, before: int, search: Search) -> set[fx.Node]:
    """The views, casts and sizes from the position `before` on that x is made of."""
    found: set[fx.Node] = set()
    waiting = [x]
    while waiting:
        node = waiting.pop()
        if search.state.order[node] < before:
            continue
        call = canonical(node)
        if is_tensor(node) and (call is None or call.op not in {*CHEAP, IDENTITY}):
            raise Refused(
                f"{at.name} uses the first before {node.name}, of the second, is computed"
            )
        found.add(node)
        waiting += node.all_input_nodes
    return found


def _computed(at: fx.Node, node: fx.Node, again: set[fx.Node]) -> fx.Node:
    """`node`, with those of `again` that it is made of computed before `at`."""
    if node not in again:
        return node
    inputs = {one: _computed(at, one, again) for one in node.all_input_nodes}
    with at.graph.inserting_before(at):
        return at.graph.node_copy(node, inputs.__getitem__)


def _check_tables(matches: tuple[Match, ...], search: Search) -> None:
    """Raise Refused if a table was written after something was made of it for one of `matches`."""
    tables = made_of(node for match in matches for node in match["given"])
    roots = [match.root for match in matches]
    made = filter(is_repeated, tables)
    first = min([*made, *roots], key=search.state.order.__getitem__)
    if search.state.written(tables, first, roots[-1]):
        raise Refused("a table is written in place before the rotation")


def _place(q: Match, k: Match, search: Search) -> fx.Node:
    """The node before which both results are unused, and all inputs are computed."""
    state = search.state
    at = min([k.root, *q.root.users], key=state.order.__getitem__)
    views = _later_views(k["x"], at, state.order[at], search)
    # The op gets q's tables, and k with its last views made again.
    inputs = [v for v in (*q.values.values(), k["x"]) if isinstance(v, fx.Node)]
    if not state.one_mode([q.root, k.root, at, *filter(is_tensor, views)]):
        raise Refused("the two are rotated in different gradient or autocast modes")
    if state.written([*inputs, *views], q.root, k.root):
        raise Refused("a tensor is written in place between the two rotations")
    return at
