"""The coefficients of a manifold-constrained hyper-connection, as models write them.

Sinkhorn's iterations are unrolled in the graph, and each iterate is used twice: a pattern would
visit the first one 2 ** 40 times. They are followed back from the last division to the softmax, and
what is before that, and the other two results, are patterns.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from ..engine.canonical import calls, same, value
from ..engine.graph_state import GraphState
from ..engine.pattern import Match, Pattern
from ..engine.report import Report
from ..engine.rewrite import (
    Refused,
    before_widening,
    derive,
    emit,
    items,
    number,
    obstacle,
    replace,
    reported,
)

OP = "mhc_coeffs"

# Operations between a piece of the projection and the result that is computed from it.
FURTHEST = 6
Rows = Callable[[Tensor], Tensor]
INPUTS = ("x", "fn", "base", "scale", "rms_eps")


def viewed(x: Tensor) -> Tensor:
    return x.view(x.shape[0], x.shape[1], -1)


def flattened(x: Tensor) -> Tensor:
    return x.flatten(2)


def mix(rows: Rows, x: Tensor, fn: Tensor, rms_eps: float) -> Any:
    hc = x.shape[-2]
    wide = rows(x).to(torch.float32)
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + rms_eps)
    return F.linear(wide, fn.to(torch.float32)).split([hc, hc, hc * hc], -1)


def bias(x: Tensor, base: Tensor) -> Any:
    hc = x.shape[-2]
    return base.split([hc, hc, hc * hc])


@dataclass(frozen=True)
class Spelling:
    """The patterns of the three results, for one spelling of a token's streams as a row."""

    pre: Pattern
    post: Pattern
    softmax: Pattern


def spelling(rows: Rows) -> Spelling:
    def gate(part: int, x: Tensor, fn: Tensor, base: Tensor, scale: Tensor, rms_eps: float) -> Any:
        logits = mix(rows, x, fn, rms_eps)[part] * scale.unbind(0)[part] + bias(x, base)[part]
        return torch.sigmoid(logits)

    def softmax(x: Tensor, fn: Tensor, base: Tensor, scale: Tensor, rms_eps: float) -> Tensor:
        hc = x.shape[-2]
        res = mix(rows, x, fn, rms_eps)[2].view(x.shape[0], x.shape[1], hc, hc)
        logits = res * scale.unbind(0)[2] + bias(x, base)[2].view(hc, hc)
        return torch.softmax(logits, -1)

    sizes: dict[str, Any] = {
        "x": (5, 7, 2, 3), "fn": (8, 6), "base": (8,), "scale": (3,), "rms_eps": 1e-6,
    }  # fmt: skip
    return Spelling(
        Pattern(lambda pre_eps, **of: gate(0, **of) + pre_eps, **sizes, pre_eps=0.5),
        Pattern(lambda post_mult, **of: post_mult * gate(1, **of), **sizes, post_mult=2.5),
        Pattern(softmax, **sizes),
    )


SPELLINGS = (spelling(viewed), spelling(flattened))


@dataclass(frozen=True)
class Sinkhorn:
    """The divisions by sums in a graph, from the last one back.

    `start` is what is divided first, and dims are the dimensions of the sums, from the first.
    """

    start: Any
    dims: tuple[int, ...]
    eps: tuple[Any, ...]
    nodes: frozenset[fx.Node]

    def softmax(self) -> fx.Node:
        """The softmax that the iterations start from; Refused if this is not the op's iteration."""
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
        found = _sinkhorn(last)
        if found is None:
            continue
        seen |= found.nodes
        with reported(graph, report, OP, last), state.modes_of(last):
            report.used(OP, _replace(last, found, state))


def _sinkhorn(last: fx.Node) -> Sinkhorn | None:
    """Follow divisions by the sums of columns and rows, by turns, back from the last one.

    A single division is not an iteration unless it is of the columns of a softmax: routers divide
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
    found = Sinkhorn(node, tuple(dims), tuple(eps), frozenset(nodes))
    if len(dims) == 1:
        start = calls(node, "add")
        if dims[0] != -2 or start is None or calls(start.args[0], "softmax") is None:
            return None
    return found


def _divided(node: Any) -> tuple[Any, int, Any, set[fx.Node]] | None:
    """The matrix, the dimension, the number added and the nodes of matrix / (its sums + number)."""
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


def _replace(last: fx.Node, found: Sinkhorn, state: GraphState) -> fx.Node:
    written, res = _spelled(found.softmax())
    split = next(node for node in res.nodes if _is_split(node))
    others = {
        "h_pre": _one(written.pre, split, res, "pre_eps"),
        "h_post": _one(written.post, split, res, "post_mult"),
    }
    roots = [others["h_pre"].root, others["h_post"].root, last]
    nodes = {*found.nodes, found.start, *res.nodes}.union(*(one.nodes for one in others.values()))
    inputs = (*res.values.values(), before_widening(res["fn"]))
    if reason := obstacle(roots, nodes, inputs, state):
        raise Refused(reason)
    at = min(roots, key=state.order.__getitem__)
    phi = derive(at, torch.transpose, before_widening(res["fn"]), 0, 1)
    alphas = [derive(at, operator.getitem, res["scale"], i) for i in range(3)]
    eps = number(found.eps[0])
    options = (
        (len(found.dims) + 1) // 2, number(res["rms_eps"]), number(others["h_pre"]["pre_eps"]),
        eps, number(others["h_post"]["post_mult"]),
    )  # fmt: skip
    args = (res["x"], phi, res["base"], *alphas, *options)
    op = emit(at, torch.ops.liger.mhc_coeffs_forward.default, args)
    replace(list(zip(roots, items(op, 3), strict=True)), nodes, state)
    return op


def _is_split(node: fx.Node) -> bool:
    """Whether it is the split of the projection, not that of the bias."""
    call = calls(node, "split")
    return call is not None and value(call.args[0]).dim() > 1


def _spelled(node: fx.Node) -> tuple[Spelling, Match]:
    """The spelling that the softmax matches, and the match."""
    reason = "the matrix's logits are not those of the op"
    for one in SPELLINGS:
        match = one.softmax.match(node)
        if match is not None and match.difference is None:
            return one, match
        if match is not None:
            reason = f"the matrix's logits are not those of the op: {match.difference}"
    raise Refused(reason)


def _one(pattern: Pattern, split: fx.Node, res: Match, option: str) -> Match:
    """The one result that matches a pattern, of the inputs of `res`."""
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
    """The nodes that use a node, and those that use them, and so on, up to FURTHEST."""
    waiting, seen = [node], {node}
    for _ in range(FURTHEST):
        waiting = [user for one in waiting for user in one.users if user not in seen]
        seen.update(waiting)
        yield from dict.fromkeys(waiting)
