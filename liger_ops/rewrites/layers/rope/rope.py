"""Rotary position embedding of queries and keys, as models write it.

A match is the rotation of one tensor; two rotations with the same tables become one op. The op
computes in float32 and rounds once, whereas the code may also round in between.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from ...engine.canonical import calls, canonical, is_tensor, same, value
from ...engine.graph_state import needed_by
from ...engine.insertion import Refused, derive, items, viewed
from ...engine.pattern import CHEAP, Match
from ...engine.report import Report
from ...engine.rewrite import Search, attempt, emit
from .rotation import (
    TABLES,
    Reader,
    RopeOptions,
    Rotation,
    is_repeatable,
    placement,
    same_table,
    with_sources,
)


def rewrite(graph: fx.Graph, report: Report) -> None:
    search = Search(graph, report, "rope")
    waiting: list[Match] = []
    alone: list[Match] = []
    for match, _ in search.matches([(Reader(op), None) for op in Reader.OPS]):
        search.set_aside(match)
        later = next((other for other in waiting if _is_pair(other, match)), None)
        if later is None:
            waiting.append(match)
            continue
        # Matches come from the end of the graph, so the one that waits is the later in the graph.
        waiting.remove(later)
        try:
            with attempt(search.graph):
                _put((match, later), _insertion_point(match, later, search), search)
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
    """Return whether two rotations have the same options and tables, so that one op does both."""
    tables = [[match.values.get(name) for name in TABLES] for match in (a, b)]
    return a["rotation"].options == b["rotation"].options and all(map(same_table, *tables))


def _put(matches: tuple[Match, ...], at: fx.Node, search: Search) -> None:
    """Replace the rotations of one tensor or two by one op, inserted before `at`."""
    rotation: Rotation = matches[0]["rotation"]
    options = rotation.options
    placements = [placement(match["x"], match["rotation"].cos[0]) for match in matches]
    if placements[-1] != placements[0]:
        raise Refused("queries and keys have their heads at different dimensions")
    _check_tables(matches, search)
    views, views_back = placements[0].views()
    position = search.state.order[at]
    tensors = [viewed(at, _as_result(at, match, position, search), views) for match in matches]
    if len(tensors) == 1:
        # The op takes two tensors. The second is given no heads: nothing is computed for it.
        none = derive(at, torch.Tensor.detach, tensors[0])
        tensors.append(derive(at, torch.narrow, none, 1, 0, 0))
    tables: list[Any] = [equal and placements[0].table(at, equal) for equal in rotation[1:3]]
    if rotation.scale is not None:
        scale = placements[0].table(at, rotation.scale)
        tables = [derive(at, torch.mul, derive(at, torch.Tensor.float, t), scale) for t in tables]
    if options.back:
        tables[1] = derive(at, torch.neg, tables[1])
    factors = (node for match in matches for node in match["given"])
    table_nodes = set(filter(is_repeatable, with_sources(factors)))
    sections = None
    if (combination := _sections(tables, options)) is not None:
        *tables, sections, combined = combination
        table_nodes |= combined
    # Views of tables that nothing else uses are erased with the match.
    matches = tuple(replace(match, nodes=match.nodes | table_nodes) for match in matches)
    *flags, deinterleave, _ = options
    args = (*tensors, *tables, *flags, sections, deinterleave)
    with search.state.modes_of(at):
        op = emit(at, torch.ops.liger.rope.default, args)
    # The op's results have the strides of x, while torch.cat's are contiguous: `replace` refuses if
    # the graph would observe that.
    results = [viewed(at, new, views_back) for new in items(op, len(matches))]
    search.replace(*zip(matches, results, strict=True))
    search.used(op)


def _sections(tables: list[Any], options: RopeOptions) -> tuple[Any, ...] | None:
    """Read cos and sin that are combined from three tables each, as in multimodal models.

    Returns the two tensors of three tables, the widths of the sections, and the nodes that combine
    them; None for other tables.
    """
    if options != RopeOptions():
        return None
    combined = [_combined(table) for table in tables]
    if combined[0] is None or combined[1] is None or combined[0][1] != combined[1][1]:
        return None
    return combined[0][0], combined[1][0], combined[0][1], combined[0][2] | combined[1][2]


def _combined(table: fx.Node) -> tuple[fx.Node, list[int], frozenset[fx.Node]] | None:
    """Read a table whose columns are sections of three tables in turn.

    Returns the three tables, of shape (3, B, S, R), the widths of the sections, and the nodes that
    combine them; None for another table.
    """
    joined = calls(table, "cat")
    if joined is None or joined.args[1] != -1 or len(joined.args[0]) != 6:
        return None
    source: Any = None
    widths, position, nodes = [], 0, {table}
    for i, piece in enumerate(joined.args[0]):
        item = calls(piece, "getitem")
        section = item and calls(item.args[0], "slice")
        if not item or not section or not same(item.args[1], (i % 3, *[slice(None)] * 3)):
            return None
        width = value(piece).shape[-1]
        source = source or section.args[0]
        columns = (-1, position, position + width, 1)
        if section.args[0] is not source or not same(section.args[1:], columns):
            return None
        widths.append(width)
        position += width
        nodes |= {piece, item.args[0], *section.through}
    if not same(tuple(value(source).shape[::3]), (3, position)) or widths[:3] != widths[3:]:
        return None
    return source, widths[:3], frozenset(nodes)


def _as_result(at: fx.Node, match: Match, before: int, search: Search) -> fx.Node:
    """Return x, computed before `at`, in the dtype of the code's result.

    Under autocast this dtype is wider than that of x if the tables' is.
    """
    x, dtype = match["x"], value(match.root).dtype
    x = _copied_before(at, x, _later_views(x, at, before, search))
    return x if value(x).dtype == dtype else derive(at, torch.Tensor.to, x, dtype)


def _later_views(x: fx.Node, at: fx.Node, before: int, search: Search) -> set[fx.Node]:
    """Return the nodes from the position `before` on that x is computed from.

    Raises Refused unless all of them are views, casts or sizes, which can be computed again before
    `at`.
    """
    order = search.state.order
    later = {n for n in needed_by(x, end=lambda n: order[n] < before) if order[n] >= before}
    for node in filter(is_tensor, later):
        call = canonical(node)
        if call is None or call.op not in CHEAP:
            raise Refused(
                f"{at.name} uses the first before {node.name}, of the second, is computed"
            )
    return later


def _copied_before(at: fx.Node, node: fx.Node, again: set[fx.Node]) -> fx.Node:
    """Return a copy of `node` before `at`, and copies of the nodes of `again` that it uses."""
    if node not in again:
        return node
    inputs = {n: _copied_before(at, n, again) for n in node.all_input_nodes}
    with at.graph.inserting_before(at):
        return at.graph.node_copy(node, inputs.__getitem__)


def _check_tables(matches: tuple[Match, ...], search: Search) -> None:
    """Raise Refused if a table is written after it was read for one of `matches`."""
    tables = with_sources(node for match in matches for node in match["given"])
    roots = [match.root for match in matches]
    computed = filter(is_repeatable, tables)
    first = min([*computed, *roots], key=search.state.order.__getitem__)
    if search.state.written(tables, first, roots[-1]):
        raise Refused("a table is written in place before the rotation")


def _insertion_point(q: Match, k: Match, search: Search) -> fx.Node:
    """Return the node before which one op for both rotations goes: no result is used before it.

    Raises Refused if an input of the second is computed only after it, if the two run in different
    modes, or if a tensor is written in place between them.
    """
    state = search.state
    at = min([k.root, *q.root.users], key=state.order.__getitem__)
    views = _later_views(k["x"], at, state.order[at], search)
    # The op reads q's tables, and k through copies of its last views.
    inputs = [v for v in (*q.values.values(), k["x"]) if isinstance(v, fx.Node)]
    if not state.one_mode([q.root, k.root, at, *filter(is_tensor, views)]):
        raise Refused("the two are rotated in different gradient or autocast modes")
    if state.written([*inputs, *views], q.root, k.root):
        raise Refused("a tensor is written in place between the two rotations")
    return at
