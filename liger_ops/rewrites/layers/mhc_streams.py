"""The streams of a hyper-connection, as models write them: their sum before a layer, mhc_pre, and
their mixing after it, mhc_post_res.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx

from ..engine.canonical import calls, is_tensor, value
from ..engine.graph_state import GraphState
from ..engine.insertion import derive
from ..engine.pattern import Match, Pattern
from ..engine.report import Report
from ..engine.rewrite import Search, emit, match_obstacle, put_all


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
