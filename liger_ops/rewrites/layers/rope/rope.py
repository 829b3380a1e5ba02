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
from .rope_spellings import SPELLINGS, VIEWS
from .rope_tables import Placement, expanded, placement
from .rotation import Form
from .same_tables import alike, repeated, sources

TABLES = ("cos", "sin", "scale")


def rewrite(graph: fx.Graph, report: Report) -> None:
    search = Search(graph, report, "rope")
    waiting: list[tuple[Match, Form]] = []
    alone: list[tuple[Match, Form]] = []
    for match, known in search.matches(SPELLINGS):
        search.set_aside(match)
        form: Form = known or match["form"]
        pair = next((one for one in waiting if _is_pair(one, (match, form))), None)
        if pair is None:
            waiting.append((match, form))
            continue
        # Matches come from the end of the graph, so the first one found is the later one.
        waiting.remove(pair)
        later = pair[0]
        try:
            with attempt(search.graph):
                _put((match, later), _place(match, later, search), form, search)
        except Refused:
            alone += [pair, (match, form)]
    for match, form in [*alone, *waiting]:
        try:
            with attempt(search.graph):
                _put((match,), match.root, form, search)
        except Refused as refused:
            search.refuse(match, str(refused))
    search.finish()


def _is_pair(a: tuple[Match, Form], b: tuple[Match, Form]) -> bool:
    tables = [[one.values.get(name) for name in (*TABLES, "heads")] for one, _ in (a, b)]
    return a[1] == b[1] and all(
        alike(expanded(x), expanded(y)) for x, y in zip(*tables, strict=True)
    )


def _put(matches: tuple[Match, ...], at: fx.Node, form: Form, search: Search) -> None:
    """Replace the rotations of one tensor or two by one op, inserted before `at`."""
    places = [_placement(match, form) for match in matches]
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
    values = matches[0].values
    tables = [places[0].table(at, expanded(values.get(name))) for name in ("cos", "sin")]
    if "scale" in values:
        scale = places[0].table(at, expanded(values["scale"]))
        tables = [derive(at, torch.mul, derive(at, torch.Tensor.float, t), scale) for t in tables]
    if form.back:
        tables[1] = derive(at, torch.neg, tables[1])
    passed = {node for match in matches for node in _sources(match) if repeated(node)}
    sections = None
    if (parts := _sections(tables, form)) is not None:
        *tables, sections, combined = parts
        passed |= combined
    # Views of tables that nothing else uses are erased with the match.
    matches = tuple(replace(match, nodes=match.nodes | passed) for match in matches)
    args: tuple[Any, ...] = (*tensors, *tables, form.interleaved, form.per_pair)
    if form.deinterleave:
        args = (*args, None, True)
    elif sections is not None:
        args = (*args, sections)
    with search.state.modes_of(at):
        op = emit(at, torch.ops.liger.rope.default, args)
    # The op's results have the strides of x; those of torch.cat do not.
    results = [viewed(at, new, back) for new in items(op, len(matches))]
    search.replace(*zip(matches, results, strict=True))
    search.used(op)


def _sections(tables: list[fx.Node], form: Form) -> tuple[Any, ...] | None:
    """If both tables are combined from three each, as multimodal models do: the tables of three,
    the sections, and the nodes that combine them; None otherwise."""
    if form != Form() or len(tables) != 2:
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


def _sources(match: Match) -> list[fx.Node]:
    """The nodes that the tables of a match are views of, and those views."""
    given = match.values.get("given", [match.values.get(name) for name in TABLES])
    return [node for table in given for node in sources(table)]


def _check_tables(matches: tuple[Match, ...], search: Search) -> None:
    """Raise Refused if a table was written after something was made of it for one of `matches`."""
    tables = [node for match in matches for node in _sources(match)]
    made = [node for node in tables if repeated(node)]
    roots = [match.root for match in matches]
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


def _placement(match: Match, form: Form) -> Placement:
    if any(name in match.values and not _is_view(match, name) for name in VIEWS):
        raise Refused("its views put together elements that are not pairs")
    heads = match.values.get("heads")
    if heads is not None:
        heads = int(value(heads))
        # The matrices that get the dimension have two more than a table, and one more then.
        heads += 4 + form.inner if heads < 0 else 0
    inner = form.inner if heads is None else 0
    return placement(match["x"], expanded(match["cos"]), inner, heads)


def _is_view(match: Match, name: str) -> bool:
    """Whether a parameter is the shape that it must be; one size may be written as -1."""
    expected = VIEWS[name](value(match["x"]).shape, value(match["cos"]).shape)
    given = match[name]
    return len(given) == len(expected) and all(
        same(a, b) or same(a, -1) for a, b in zip(given, expected, strict=True)
    )
