"""Manifold-constrained hyper-connections, as models write them: their coefficients, the sum of
their streams before a layer, mhc_pre, and their mixing after it, mhc_post_res.

Sinkhorn's iterations are unrolled in the graph, and each iterate is used twice: after 40 divisions
a pattern would visit the first one 2 ** 40 times. Instead the divisions are followed back from the
last one to the softmax. The code of the softmax, and of the other two results, is matched by
patterns.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from ..engine.canonical import calls, is_tensor, same, value
from ..engine.graph_state import GraphState
from ..engine.insertion import Refused, derive, items
from ..engine.pattern import Match, Pattern
from ..engine.report import Report
from ..engine.rewrite import (
    Search,
    before_widening,
    emit,
    match_obstacle,
    number,
    obstacle,
    put_all,
    replace,
    reported,
)

OP = "mhc_coeffs"

# Most operations between a piece of the projection and the result that is computed from it.
FURTHEST = 6
# Function that views the streams of each token as one row.
AsRows = Callable[[Tensor], Tensor]
INPUTS = ("x", "fn", "base", "scale", "rms_eps")


def viewed(x: Tensor) -> Tensor:
    return x.view(x.shape[0], x.shape[1], -1)


def flattened(x: Tensor) -> Tensor:
    return x.flatten(2)


def mix(rows: AsRows, x: Tensor, fn: Tensor, rms_eps: float) -> Any:
    hc = x.shape[-2]
    wide = rows(x).to(torch.float32)
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + rms_eps)
    return F.linear(wide, fn.to(torch.float32)).split([hc, hc, hc * hc], -1)


def bias(x: Tensor, base: Tensor) -> Any:
    hc = x.shape[-2]
    return base.split([hc, hc, hc * hc])


@dataclass(frozen=True)
class ResultPatterns:
    """The patterns of the three results, for one way to view a token's streams as a row."""

    pre: Pattern
    post: Pattern
    softmax: Pattern


def spelling(rows: AsRows) -> ResultPatterns:
    def gate(i: int, x: Tensor, fn: Tensor, base: Tensor, scale: Tensor, rms_eps: float) -> Any:
        logits = mix(rows, x, fn, rms_eps)[i] * scale.unbind(0)[i] + bias(x, base)[i]
        return torch.sigmoid(logits)

    def softmax(x: Tensor, fn: Tensor, base: Tensor, scale: Tensor, rms_eps: float) -> Tensor:
        hc = x.shape[-2]
        res = mix(rows, x, fn, rms_eps)[2].view(x.shape[0], x.shape[1], hc, hc)
        logits = res * scale.unbind(0)[2] + bias(x, base)[2].view(hc, hc)
        return torch.softmax(logits, -1)

    sizes: dict[str, Any] = {
        "x": (5, 7, 2, 3), "fn": (8, 6), "base": (8,), "scale": (3,), "rms_eps": 1e-6,
    }  # fmt: skip
    return ResultPatterns(
        Pattern(lambda pre_eps, **args: gate(0, **args) + pre_eps, **sizes, pre_eps=0.5),
        Pattern(lambda post_mult, **args: post_mult * gate(1, **args), **sizes, post_mult=2.5),
        Pattern(softmax, **sizes),
    )


SPELLINGS = (spelling(viewed), spelling(flattened))


@dataclass(frozen=True)
class Sinkhorn:
    """The alternating divisions of a matrix by the sums of its columns and of its rows.

    Attributes:
        start: the matrix that is divided first.
        dims: the dimension of each sum, in the order of computation.
        eps: the number added to each sum, from the last.
        nodes: the nodes of the divisions.
    """

    start: Any
    dims: tuple[int, ...]
    eps: tuple[Any, ...]
    nodes: frozenset[fx.Node]

    def softmax(self) -> fx.Node:
        """Return the softmax that the iterations start from.

        Raises Refused if the op computes another iteration.
        """
        if self.dims[0] != -2 or self.dims[-1] != -2:
            raise Refused("its divisions do not start and end with the columns")
        start = calls(self.start, "add")
        if start is None or calls(start.args[0], "softmax") is None:
            raise Refused("its divisions do not start from a softmax plus a number")
        if not all(same(start.args[1], eps) for eps in self.eps):
            raise Refused("the number added to the softmax is not that added to every sum")
        node: fx.Node = start.args[0]
        return node


def rewrite(graph: fx.Graph, report: Report) -> None:
    state = GraphState(graph)
    seen: set[fx.Node] = set()
    for last in report.visiting(OP, reversed(list(graph.nodes))):
        if last in seen or state.transformed(last):
            continue
        sinkhorn = _sinkhorn(last)
        if sinkhorn is None:
            continue
        seen |= sinkhorn.nodes
        with reported(graph, report, OP, last), state.modes_of(last):
            report.used(OP, _replace(last, sinkhorn, state))


def _sinkhorn(last: fx.Node) -> Sinkhorn | None:
    """Follow alternating divisions by the sums of columns and rows back from the last one.

    A single division counts only if it divides a softmax by the sums of its columns: routers divide
    their weights by a sum too.
    """
    node: Any = last
    dims: list[int] = []
    eps: list[Any] = []
    nodes: set[fx.Node] = set()
    while (step := _divided(node)) is not None and (not dims or step[1] == -3 - dims[0]):
        matrix, dim, added, through = step
        dims.insert(0, dim)
        eps.append(added)
        nodes |= through
        node = matrix
    if not dims:
        return None
    sinkhorn = Sinkhorn(node, tuple(dims), tuple(eps), frozenset(nodes))
    if len(dims) == 1:
        start = calls(node, "add")
        if dims[0] != -2 or start is None or calls(start.args[0], "softmax") is None:
            return None
    return sinkhorn


def _divided(node: Any) -> tuple[Any, int, Any, set[fx.Node]] | None:
    """Read matrix / (its sums over a dimension + number).

    Returns the matrix, the dimension, the number, and the nodes of the division.
    """
    division = calls(node, "div")
    added = division and calls(division.args[1], "add")
    if not division or not added:
        return None
    total = calls(added.args[0], "sum")
    matrix = division.args[0]
    if total is None or total.args[0] is not matrix or total.args[2:] != (True, None):
        return None
    if total.args[1] not in ((-1,), (-2,)):
        return None
    return matrix, total.args[1][0], added.args[1], {node, division.args[1], added.args[0]}


def _replace(last: fx.Node, sinkhorn: Sinkhorn, state: GraphState) -> fx.Node:
    patterns, res = _matching_patterns(sinkhorn.softmax())
    split = next(node for node in res.nodes if _is_split(node))
    others = {
        "h_pre": _matching_result(patterns.pre, split, res, "pre_eps"),
        "h_post": _matching_result(patterns.post, split, res, "post_mult"),
    }
    roots = [others["h_pre"].root, others["h_post"].root, last]
    nodes = {*sinkhorn.nodes, sinkhorn.start, *res.nodes}.union(*(m.nodes for m in others.values()))
    inputs = (*res.values.values(), before_widening(res["fn"]))
    if reason := obstacle(roots, nodes, inputs, state):
        raise Refused(reason)
    at = min(roots, key=state.order.__getitem__)
    phi = derive(at, torch.transpose, before_widening(res["fn"]), 0, 1)
    alphas = [derive(at, operator.getitem, res["scale"], i) for i in range(3)]
    eps = number(sinkhorn.eps[0])
    options = (
        (len(sinkhorn.dims) + 1) // 2, number(res["rms_eps"]), number(others["h_pre"]["pre_eps"]),
        eps, number(others["h_post"]["post_mult"]),
    )  # fmt: skip
    args = (res["x"], phi, res["base"], *alphas, *options)
    op = emit(at, torch.ops.liger.mhc_coeffs_forward.default, args)
    replace(list(zip(roots, items(op, 3), strict=True)), nodes, state)
    return op


def _is_split(node: fx.Node) -> bool:
    """Return whether a node is the split of the projection, not that of the bias."""
    call = calls(node, "split")
    return call is not None and value(call.args[0]).dim() > 1


def _matching_patterns(node: fx.Node) -> tuple[ResultPatterns, Match]:
    """Return the patterns that the code of the softmax matches, and the match.

    Raises Refused if there are none.
    """
    reason = "the matrix's logits are not those of the op"
    for patterns in SPELLINGS:
        match = patterns.softmax.match(node)
        if match is not None and match.difference is None:
            return patterns, match
        if match is not None:
            reason = f"the matrix's logits are not those of the op: {match.difference}"
    raise Refused(reason)


def _matching_result(pattern: Pattern, split: fx.Node, res: Match, option: str) -> Match:
    """Return the match of a result that is computed from the projection and the inputs of `res`.

    Raises Refused if there is none; `option` is its argument, for the reason.
    """
    reason = f"its projection has no result with the option {option}"
    for node in _after(split):
        match = pattern.match(node)
        if match is None or node in res.nodes:
            continue
        if match.difference is not None:
            reason = match.difference
        elif all(_is_same(match[name], res[name]) for name in INPUTS):
            return match
    raise Refused(reason)


def _is_same(a: Any, b: Any) -> bool:
    return a is b or (not isinstance(value(a), Tensor) and same(a, b))


def _after(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the users of a node, their users, and so on, over at most FURTHEST operations."""
    waiting, seen = [node], {node}
    for _ in range(FURTHEST):
        waiting = [user for used in waiting for user in used.users if user not in seen]
        seen.update(waiting)
        yield from dict.fromkeys(waiting)


def weighted_sum(x: Tensor, h_pre: Tensor) -> Tensor:
    return (h_pre.unsqueeze(-1) * x).sum(-2).to(x.dtype)


def mixed(x: Tensor, f_out: Tensor, h_post: Tensor, h_res: Tensor) -> Tensor:
    return h_post.unsqueeze(-1) * f_out.unsqueeze(-2) + torch.matmul(h_res, x)


def rewrite_pre(graph: fx.Graph, report: Report) -> None:
    """Replace weighted sums whose weights are h_pre of `mhc_coeffs`.

    Other code with this sum, such as that of experts, does not gain from the op.
    """
    search = Search(graph, report, "mhc_pre")
    for h_pre in report.visiting("mhc_pre", list(_weights(graph))):
        match: Match | None = None
        reason: str | None = "h_pre is not used in a sum of the streams that it weights"
        for node in _users_of(h_pre):
            with search.state.modes_of(node):
                match = PRE.match(node)
            if match is not None:
                reason = match.difference or match_obstacle(match, search.state)
                break
        if match is None or reason is not None:
            report.refused("mhc_pre", h_pre, str(reason))
            continue
        search.attempt(match, _put, torch.ops.liger.mhc_pre.default, search)
    search.finish()


def rewrite_post_res(graph: fx.Graph, report: Report) -> None:
    spellings = [(POST_RES, torch.ops.liger.mhc_post_res.default)]
    put_all(graph, report, "mhc_post_res", spellings, _put)


def _put(match: Match, op: Any, search: Search) -> fx.Node:
    with search.state.modes_of(match.root):
        values, nodes = dict(match.values), match.nodes
        for name in ("h_post", "h_res"):
            if name in values:
                values[name], more = _before_rounding(values[name], match, search.state)
                nodes |= more
        new = emit(match.root, op, tuple(values[name] for name in _ARGUMENTS if name in values))
        search.replace((dataclasses.replace(match, nodes=nodes), new))
    return new


def _weights(graph: fx.Graph) -> Iterator[fx.Node]:
    """Yield the results h_pre of `mhc_coeffs` in a graph that no `mhc_pre` takes yet."""
    for node in graph.nodes:
        if node.target is not operator.getitem or node.args[1] != 0 or not node.users:
            continue
        source: Any = node.args[0]
        taken = any(user.target is torch.ops.liger.mhc_pre.default for user in node.users)
        if source.target is torch.ops.liger.mhc_coeffs_forward.default and not taken:
            yield node


def _users_of(h_pre: fx.Node) -> list[fx.Node]:
    """Return nodes that depend on h_pre, among them those of the weighted sum, from the last."""
    users = [h_pre]
    for node in users:
        if len(users) < 6:
            users += [user for user in node.users if user not in users]
    return users[:0:-1]


def _before_rounding(
    coefficient: fx.Node, match: Match, state: GraphState
) -> tuple[fx.Node, set[fx.Node]]:
    """Return a coefficient of the streams before it was rounded, and the nodes not needed any more.

    The code rounds h_post and h_res to the dtype of x, because PyTorch's product needs one dtype.
    The op takes them in float32, where neither they nor their gradients are rounded.
    """
    transposed = calls(coefficient, "transpose")
    rounded = transposed.args[0] if transposed else coefficient
    cast = calls(rounded, "cast")
    if cast is None or cast.args[1] != value(match["x"]).dtype:
        return coefficient, set()
    source = cast.args[0]
    is_wide = is_tensor(source) and value(source).dtype is torch.float32
    if not is_wide or not state.one_mode([rounded, match.root]):
        return coefficient, set()
    if state.written([source], rounded, match.root):
        return coefficient, set()
    if transposed is not None:
        source = derive(match.root, torch.transpose, source, *transposed.args[1])
    return source, {coefficient, rounded}


_ARGUMENTS = ("x", "h_pre", "f_out", "h_post", "h_res")
PRE = Pattern(weighted_sum, x=(5, 7, 2, 3), h_pre=(5, 7, 2))
POST_RES = Pattern(mixed, x=(5, 7, 2, 3), f_out=(5, 7, 3), h_post=(5, 7, 2), h_res=(5, 7, 2, 2))
