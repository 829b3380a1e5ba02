"""The streams of a hyper-connection before and after a layer, as models write them."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from ..engine.canonical import calls, is_tensor, value
from ..engine.graph_state import GraphState
from ..engine.pattern import Match, Pattern
from ..engine.report import Report
from ..engine.rewrite import Search, derive, emit, match_obstacle, put_all


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
        for node in _after(h_pre):
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
        args, nodes = _unrounded(match, search.state)
        new = emit(match.root, op, args)
        search.replace((replace(match, nodes=match.nodes | nodes), new))
    return new


def _weights(graph: fx.Graph) -> Iterator[fx.Node]:
    """The results h_pre of `mhc_coeffs` in a graph that no `mhc_pre` takes."""
    for node in graph.nodes:
        if node.target is not operator.getitem or node.args[1] != 0 or not node.users:
            continue
        of: Any = node.args[0]
        taken = any(user.target is torch.ops.liger.mhc_pre.default for user in node.users)
        if of.target is torch.ops.liger.mhc_coeffs_forward.default and not taken:
            yield node


def _after(h_pre: fx.Node) -> list[fx.Node]:
    """The nodes of the weighted sum, from the last."""
    found = [h_pre]
    for node in found:
        if len(found) < 6:
            found += [user for user in node.users if user not in found]
    return found[:0:-1]


def _unrounded(match: Match, state: GraphState) -> tuple[tuple[Any, ...], set[fx.Node]]:
    """The op's arguments, and the nodes that they make superfluous.

    The code rounds h_post and h_res to the dtype of x, because PyTorch's product needs one dtype.
    The op takes them in float32, and so does not round them or their gradients.
    """
    if "h_pre" in match.values:
        return (match["x"], match["h_pre"]), set()
    h_post, rounded_post = _before_rounding(match["h_post"], match, state)
    turned = calls(match["h_res"], "transpose")
    if turned is None:
        h_res, rounded_res = _before_rounding(match["h_res"], match, state)
    else:
        h_res, rounded_res = _before_rounding(turned.args[0], match, state)
        if rounded_res:
            h_res = derive(match.root, torch.transpose, h_res, *turned.args[1])
            rounded_res.add(match["h_res"])
        else:
            h_res = match["h_res"]
    return (match["x"], match["f_out"], h_post, h_res), rounded_post | rounded_res


def _before_rounding(given: Any, match: Match, state: GraphState) -> tuple[Any, set[fx.Node]]:
    cast = calls(given, "cast")
    if cast is None or cast.args[1] != value(match["x"]).dtype:
        return given, set()
    source = cast.args[0]
    is_wide = is_tensor(source) and value(source).dtype is torch.float32
    if not is_wide or not state.one_mode([given, match.root]):
        return given, set()
    if state.written([source], given, match.root):
        return given, set()
    return source, {given}


PRE = Pattern(weighted_sum, x=(5, 7, 2, 3), h_pre=(5, 7, 2))
POST_RES = Pattern(mixed, x=(5, 7, 2, 3), f_out=(5, 7, 3), h_post=(5, 7, 2), h_res=(5, 7, 2, 2))
