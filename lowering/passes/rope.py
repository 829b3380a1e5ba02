"""Rotary position embedding of queries and keys, as models write it.

The patterns match the rotation of one tensor; two rotations with the same tables become one op.
The op computes in float32 and rounds once, wherever the code rounds.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from .canonical import calls, canonical, same, value
from .pattern import Match, Pattern
from .report import Report
from .rewrite import Refused, Search, attempt, derive, emit, items


def turned_halves(x: Tensor) -> Tensor:
    x1 = x[..., : x.shape[-1] // 2]
    x2 = x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


def turned_back_halves(x: Tensor) -> Tensor:
    x1 = x[..., : x.shape[-1] // 2]
    x2 = x[..., x.shape[-1] // 2 :]
    return torch.cat((x2, -x1), dim=-1)


def turned_neighbours(x: Tensor) -> Tensor:
    x1 = x[..., 0::2]
    x2 = x[..., 1::2]
    return torch.stack((-x2, x1), dim=-1).flatten(-2)


def llama(x: Tensor, cos: Tensor, sin: Tensor, heads: int) -> Tensor:
    cos = cos.unsqueeze(heads)
    sin = sin.unsqueeze(heads)
    return (x * cos) + (turned_halves(x) * sin)


def nanochat(x: Tensor, cos: Tensor, sin: Tensor, heads: int) -> Tensor:
    cos = cos.unsqueeze(heads)
    sin = sin.unsqueeze(heads)
    return (x * cos) + (turned_back_halves(x) * sin)


def phi3(x: Tensor, cos: Tensor, sin: Tensor, heads: int) -> Tensor:
    cos = cos.unsqueeze(heads)
    sin = sin.unsqueeze(heads)
    rotated, passed = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    return torch.cat([(rotated * cos) + (turned_halves(rotated) * sin), passed], dim=-1)


def glm4(x: Tensor, cos: Tensor, sin: Tensor, heads: int) -> Tensor:
    cos = cos.unsqueeze(heads)
    sin = sin.unsqueeze(heads)
    cos = cos[..., : cos.shape[-1] // 2].repeat_interleave(2, dim=-1)
    sin = sin[..., : sin.shape[-1] // 2].repeat_interleave(2, dim=-1)
    rotated, passed = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    rotated = (rotated * cos) + (turned_neighbours(rotated) * sin)
    return torch.cat([rotated, passed], dim=-1)


def glm(x: Tensor, cos: Tensor, sin: Tensor, heads: int) -> Tensor:
    cos = cos.unsqueeze(heads)
    sin = sin.unsqueeze(heads)
    cos = cos[..., : cos.shape[-1] // 2].repeat_interleave(2, dim=-1)
    sin = sin[..., : sin.shape[-1] // 2].repeat_interleave(2, dim=-1)
    return (x * cos) + (turned_neighbours(x) * sin)


def cohere(x: Tensor, cos: Tensor, sin: Tensor, heads: int) -> Tensor:
    cos = cos.unsqueeze(heads)
    sin = sin.unsqueeze(heads)
    return (x * cos) + (turned_neighbours(x) * sin)


def glm4v(x: Tensor, cos: Tensor, sin: Tensor, heads: int) -> Tensor:
    cos = cos.unsqueeze(heads)
    sin = sin.unsqueeze(heads)
    rotated, passed = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    return torch.cat([(rotated * cos) + (turned_neighbours(rotated) * sin), passed], dim=-1)


def gptj(x: Tensor, cos: Tensor, sin: Tensor, heads: int) -> Tensor:
    cos = cos.unsqueeze(heads).repeat_interleave(2, dim=-1)
    sin = sin.unsqueeze(heads).repeat_interleave(2, dim=-1)
    return (x * cos) + (turned_neighbours(x) * sin)


def gptj_partly(x: Tensor, cos: Tensor, sin: Tensor, heads: int) -> Tensor:
    cos = cos.unsqueeze(heads).repeat_interleave(2, dim=-1)
    sin = sin.unsqueeze(heads).repeat_interleave(2, dim=-1)
    rotated, passed = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    return torch.cat([(rotated * cos) + (turned_neighbours(rotated) * sin), passed], dim=-1)


def gpt_oss(x: Tensor, cos: Tensor, sin: Tensor, heads: int) -> Tensor:
    cos = cos.unsqueeze(heads)
    sin = sin.unsqueeze(heads)
    first, second = torch.chunk(x, 2, dim=-1)[0], torch.chunk(x, 2, dim=-1)[1]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def privacy_filter(x: Tensor, cos: Tensor, sin: Tensor, heads: int) -> Tensor:
    cos = cos.unsqueeze(heads)
    sin = sin.unsqueeze(heads)
    first, second = x[..., 0::2], x[..., 1::2]
    turned = (first * cos - second * sin, second * cos + first * sin)
    return torch.stack(turned, dim=-1).flatten(-2)


def pe_audio(
    x: Tensor, cos: Tensor, sin: Tensor, heads: int, pairs: list[int], matrices: list[int]
) -> Tensor:
    rotations = torch.stack((cos, -sin, sin, cos), dim=-1).view(matrices).unsqueeze(heads)
    return (x.reshape(pairs) * rotations).sum(-1).flatten(3)


def llama4(x: Tensor, cos: Tensor, heads: int, shape: list[int]) -> Tensor:
    pairs = torch.view_as_complex(x.float().reshape(shape))
    return torch.view_as_real(pairs * cos.unsqueeze(heads)).flatten(3).type_as(x)


@dataclass(frozen=True)
class Form:
    """How a spelling pairs elements, and the layout of its tables."""

    interleaved: bool = False
    per_pair: bool = False
    # Whether the spelling reads only the first half of its tables.
    half_tables: bool = False
    # Whether it rotates in the other direction, by -sin.
    back: bool = False
    # How many dimensions its tables have after the elements of a row when `heads` is added.
    inner: int = 0


def rewrite(graph: fx.Graph, report: Report) -> None:
    search = Search(graph, report, "rope")
    waiting: dict[Any, Match] = {}
    alone: list[tuple[Match, Form]] = []
    for match, form in search.matches(SPELLINGS):
        search.set_aside(match)
        key = (form, _table(match["cos"]), _table(match.values.get("sin")), match["heads"])
        if key not in waiting:
            waiting[key] = match
            continue
        # Matches come from the end of the graph, so the first one found is the later one.
        later = waiting.pop(key)
        try:
            _put((match, later), _place(match, later, search), form, search)
        except Refused:
            alone += [(later, form), (match, form)]
    alone += [(match, key[0]) for key, match in waiting.items()]
    for match, form in alone:
        try:
            _put((match,), match.root, form, search)
        except Refused as refused:
            search.refuse(match, str(refused))
    search.finish()


def _table(node: fx.Node | None) -> Any:
    """Identifies a table: two casts of one tensor to one dtype are the same table."""
    call = canonical(node)
    return call.args if call is not None and call.op == "cast" else node


def _put(matches: tuple[Match, ...], at: fx.Node, form: Form, search: Search) -> None:
    """Replace the rotations of one tensor or two by one op, inserted before `at`."""
    with attempt(search.graph):
        _put_all(matches, at, form, search)


def _put_all(matches: tuple[Match, ...], at: fx.Node, form: Form, search: Search) -> None:
    there, back = _views(matches[0], form)
    tensors = [_seen(at, _as_result(at, match), there) for match in matches]
    if len(tensors) == 1:
        # The op takes two tensors; the second has no heads, so nothing is computed for it.
        none = derive(at, torch.Tensor.detach, tensors[0])
        tensors.append(derive(at, torch.narrow, none, 1, 0, 0))
    tables = [matches[0]["cos"], matches[0].values.get("sin")]
    if form.half_tables:
        tables = [
            derive(at, operator.getitem, derive(at, torch.chunk, t, 2, -1), 0) for t in tables
        ]
    if form.back:
        tables[1] = derive(at, torch.neg, tables[1])
    target = torch.ops.liger.rope.default
    args: tuple[Any, ...] = (*tensors, *tables, form.interleaved, form.per_pair)
    if (parts := _sections(tables, form)) is not None:
        *tables, sections, combined = parts
        args = (*tensors, *tables, form.interleaved, form.per_pair, sections)
        matches = tuple(replace(match, nodes=match.nodes | combined) for match in matches)
    with search.state.modes_of(at):
        op = emit(at, target, args)
    # The op's results have the strides of x; those of torch.cat do not.
    results = [_seen(at, new, back) for new in items(op, len(matches))]
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


def _as_result(at: fx.Node, match: Match) -> fx.Node:
    """x in the result's dtype, which under autocast is wider if the tables are."""
    x, dtype = match["x"], value(match.root).dtype
    return x if value(x).dtype == dtype else derive(at, torch.Tensor.to, x, dtype)


def _place(q: Match, k: Match, search: Search) -> fx.Node:
    """The node before which both results are unused, and all inputs are computed."""
    state = search.state
    at = min([k.root, *q.root.users], key=state.order.__getitem__)
    # If k has its own casts of the tables, those of q replace them.
    inputs = [v for v in {**k.values, **q.values, "k": k["x"]}.values() if isinstance(v, fx.Node)]
    late = [node for node in inputs if state.order[node] >= state.order[at]]
    if late:
        raise Refused(f"{at.name} uses the first before {late[0].name}, of the second, is computed")
    if not state.one_mode([q.root, k.root, at]):
        raise Refused("the two are rotated in different gradient or autocast modes")
    tables = [t for match in (q, k) for t in (match["cos"], match.values.get("sin")) if t]
    sources = [call.args[0] for t in tables if (call := canonical(t)) and call.op == "cast"]
    first = min([q.root, *tables], key=state.order.__getitem__) if sources else q.root
    if state.written([*inputs, *tables], q.root, k.root) or state.written(sources, first, k.root):
        raise Refused("a tensor is written in place between the two rotations")
    return at


# A view and its arguments after the tensor.
View = tuple[Any, ...]


def _views(match: Match, form: Form) -> tuple[list[View], list[View]]:
    """The views from x to (B, heads, S, D), and those from the op's result back."""
    rank, heads = value(match["x"]).dim(), match["heads"]
    heads += form.inner if heads < 0 else 0
    if rank not in (3, 4):
        raise Refused(f"the rotated tensor has {rank} dimensions, not 4")
    there: list[View] = []
    back: list[View] = []
    if rank == 3:
        there, back = [(torch.unsqueeze, 0)], [(torch.squeeze, 0)]
    # `heads` is the dimension that unsqueeze adds to the tables; negative counts from the end.
    if heads in (2, -2) if rank == 4 else heads in (1, -2):
        there, back = [*there, (torch.transpose, 1, 2)], [(torch.transpose, 1, 2), *back]
    return there, back


def _seen(at: fx.Node, of: fx.Node, views: list[View]) -> fx.Node:
    for view, *arguments in views:
        of = derive(at, view, of, *arguments)
    return of


def _pattern(function: Callable[..., Tensor], elements: int, **sizes: list[int]) -> Pattern:
    tables = {"cos": (1, 3, elements), "sin": (1, 3, elements)}
    return Pattern(function, any_casts=True, x=(2, 5, 3, 8), **tables, heads=1, **sizes)


_PE_AUDIO = _pattern(pe_audio, 4, pairs=[2, 5, 3, 4, 1, 2], matrices=[1, 3, 4, 2, 2])
_LLAMA4 = Pattern(
    llama4,
    any_casts=True,
    x=(2, 3, 5, 8),
    cos=torch.empty(1, 3, 4, dtype=torch.complex64, device="meta"),
    heads=2,
    shape=[2, 3, 5, 4, 2],
)
SPELLINGS = [
    (_pattern(llama, 8), Form()),
    (_pattern(phi3, 4), Form()),
    (_pattern(glm4, 4), Form(interleaved=True, per_pair=True, half_tables=True)),
    (_pattern(glm, 8), Form(interleaved=True, per_pair=True, half_tables=True)),
    (_pattern(glm4v, 4), Form(interleaved=True)),
    (_pattern(gptj_partly, 2), Form(interleaved=True, per_pair=True)),
    (_pattern(gptj, 4), Form(interleaved=True, per_pair=True)),
    (_pattern(nanochat, 8), Form(back=True)),
    (_pattern(cohere, 8), Form(interleaved=True)),
    (_pattern(gpt_oss, 4), Form(per_pair=True)),
    (_pattern(privacy_filter, 4), Form(interleaved=True, per_pair=True)),
    (_PE_AUDIO, Form(interleaved=True, per_pair=True, inner=2)),
    (_LLAMA4, Form()),
]
