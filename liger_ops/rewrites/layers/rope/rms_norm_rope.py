"""The norms of the heads of queries and keys, and their rotation, in one op: Qwen3, Gemma 3.

Runs after the rewrite rope, on the ops that it inserted and on those of the user's code. Before a
rotation it looks for the op rms_norm and for norms that are written out, because the rewrite
rms_norm is off by default with Inductor.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
from torch import fx

from ...engine.canonical import IDENTITY, calls, canonical, is_tensor, same, value
from ...engine.casts import is_marked, mark, modes_of
from ...engine.graph_state import GraphState
from ...engine.insertion import Refused, View, derive, items, viewed
from ...engine.pattern import Pattern, last_operation
from ...engine.report import Report
from ...engine.rewrite import (
    emit,
    foreign,
    match_obstacle,
    replace,
    reported,
    require_unwritten_sources,
    runs_outside,
)
from .. import layer_norm, rms_norm

OP = "rms_norm_rope"


class Norm(NamedTuple):
    """The norm whose result is rotated.

    Attributes:
        root: its last operation.
        options: eps, offset and casting mode.
        nodes: the nodes that the op replaces: the norm's operations, and the views after it.
        is_outside: whether the norm runs in the dtypes of its inputs under autocast too.
        views: the views between the norm and the rotation, in their order.
    """

    root: fx.Node
    x: fx.Node
    weight: fx.Node | None
    options: tuple[Any, ...]
    nodes: frozenset[fx.Node]
    is_outside: bool
    views: tuple[View, ...] = ()


def rewrite(graph: fx.Graph, report: Report) -> None:
    state = GraphState(graph)
    for rotation in report.visiting(OP, list(graph.nodes)):
        call = calls(rotation, "liger.rope")
        if call is None or not rotation.users or state.transformed(rotation):
            continue
        with reported(graph, report, OP, rotation):
            _fuse(rotation, call.args, state, report)


def _fuse(rotation: fx.Node, args: tuple[Any, ...], state: GraphState, report: Report) -> None:
    q, k, *tables = args
    empty_keys = _empty_key_nodes(k)
    is_alone = bool(empty_keys)
    maybe_norms = [_norm(x, state) for x in ([q] if is_alone else [q, k])]
    norms = [norm for norm in maybe_norms if norm is not None]
    if not norms:
        return
    if len(norms) < len(maybe_norms):
        raise Refused("queries or keys are rotated without a norm")
    nodes = empty_keys.union(*(norm.nodes for norm in norms))
    _check(norms, rotation, nodes, state)
    with modes_of(rotation, state, norms[0].is_outside) as is_outside:
        tensors = [viewed(rotation, norm.x, norm.views) for norm in norms]
        weights = [norm.weight for norm in norms]
        if is_alone:
            # Keys of no heads, as the rewrite rope makes them. They get a weight as well, because
            # the op adds the offset to both weights.
            detached = derive(rotation, torch.Tensor.detach, tensors[0])
            tensors.append(derive(rotation, torch.narrow, detached, 1, 0, 0))
            weights.append(weights[0] and derive(rotation, torch.Tensor.detach, weights[0]))
        cos, sin, *rest = tables
        op_args = (*tensors, cos, sin, *weights, *norms[0].options, *rest)
        fused = emit(rotation, torch.ops.liger.rms_norm_rope.default, op_args)
        if is_outside:
            mark(fused)
    results = items(fused, 2)
    replaced = [(user, results[int(user.args[1])]) for user in rotation.users]  # type: ignore[arg-type]
    replace(replaced, {*nodes, rotation, *rotation.users}, state)
    for node in (*nodes, rotation):
        report.superseded(node)
    report.used(OP, fused)


def _check(
    norms: list[Norm], rotation: fx.Node, nodes: frozenset[fx.Node], state: GraphState
) -> None:
    """Raise Refused unless one op at `rotation` computes the same."""
    for norm in norms[1:]:
        if norm.is_outside != norms[0].is_outside:
            raise Refused("autocast casts what one of the norms computes with")
        names = ("eps", "offset", "casting mode")
        for name, a, b in zip(names, norms[0].options, norm.options, strict=True):
            if not same(a, b):
                raise Refused(f"the norm of queries has the {name} {a}, and that of keys {b}")
    for norm in norms:
        for node in norm.nodes:
            # `match_obstacle` has checked the users of the nodes before the norm's last.
            is_last = node is norm.root or state.order[node] > state.order[norm.root]
            outside = [user for user in node.users if user not in nodes and user is not rotation]
            if is_last and outside:
                raise Refused(f"{node.name} is used elsewhere, by {outside[0].name}")
    if any(user.target is not operator.getitem for user in rotation.users):
        raise Refused("its two results are used as one tuple")
    roots = [norm.root for norm in norms]
    if not state.one_mode([*roots, rotation]):
        raise Refused("the norms and the rotation run in different gradient or autocast modes")
    inputs = [x for norm in norms for x in (norm.x, norm.weight) if x is not None]
    if reason := foreign([*inputs, *rotation.all_input_nodes]):
        raise Refused(reason)
    first = min(roots, key=state.order.__getitem__)
    if state.written([*inputs, *nodes], first, rotation):
        raise Refused("a tensor is written in place between the norms and the rotation")


def _norm(rotated: fx.Node, state: GraphState) -> Norm | None:
    """Return the norm whose result `rotated` is a view of, or None if there is none.

    Raises Refused for a near miss of an rms_norm, and for a norm whose result is cast or reshaped
    before the rotation.
    """
    views: list[View] = []
    passed: set[fx.Node] = set()
    reason: str | None = None
    # An operation between the norm and the rotation that the op does not do, for the reason.
    changed: str | None = None
    node: Any = rotated
    while True:
        if isinstance(node, fx.Node):
            norm, difference = _norm_at(node, state)
            reason = reason or difference
            if norm is not None:
                if changed is not None:
                    raise Refused(f"the norm's result is {changed} before the rotation")
                return norm._replace(views=tuple(views[::-1]), nodes=norm.nodes | passed)
            passed.add(node)
        call = canonical(node)
        if call is None:
            break
        passed |= set(call.through)
        if call.op == "transpose" and -1 not in call.args[1]:
            views.append((torch.transpose, *call.args[1]))
        elif call.op in ("unsqueeze", "squeeze") and call.args[1] != -1:
            views.append((getattr(torch, call.op), call.args[1]))
        elif call.op == "view":
            changed = f"viewed as {tuple(value(node).shape)}"
        elif call.op == "cast":
            changed = f"cast to {value(node).dtype}"
        elif call.op not in (IDENTITY, "contiguous"):
            break
        node = call.args[0]
    if reason is not None:
        raise Refused(reason)
    return None


def _norm_at(node: Any, state: GraphState) -> tuple[Norm | None, str | None]:
    """Return the norm whose last operation is `node`, or how a near miss differs from the op's.

    Raises Refused for a norm that the op computes, but that cannot be replaced.
    """
    if not isinstance(node, fx.Node) or not is_tensor(node):
        return None, None
    if (op := calls(node, "liger.rms_norm")) is not None:
        x, weight, *options = op.args
        return Norm(node, x, weight, tuple(options), frozenset({node}), is_marked(node)), None
    difference, refused = None, None
    last = last_operation(node)
    with state.modes_of(node):
        # The end of a layer_norm, after the subtraction of the mean, would match an rms_norm.
        if any(_matches(pattern, node, last) for pattern, _ in layer_norm.SPELLINGS):
            return None, None
        for pattern, replacement in rms_norm.SPELLINGS:
            match = pattern.match(node) if pattern.op == last else None
            if match is None:
                continue
            why = match.difference or match_obstacle(match, state)
            if why is not None:
                difference = difference or why
                continue
            try:
                _, (x, weight, *options) = replacement(match)
                require_unwritten_sources((x, weight), match, state)
            except Refused as error:
                refused = refused or error
            else:
                is_outside = runs_outside(match, replacement)
                return Norm(node, x, weight, tuple(options), match.nodes, is_outside), None
    if refused is not None:
        raise refused
    return None, difference


def _matches(pattern: Pattern, node: fx.Node, last: str | None) -> bool:
    match = pattern.match(node) if pattern.op == last else None
    return match is not None and match.difference is None


def _empty_key_nodes(k: fx.Node) -> frozenset[fx.Node]:
    """Return the nodes that make keys of no heads, which the rewrite rope gives a single rotation.

    Other keys have no such nodes.
    """
    narrowed = calls(k, "slice")
    if narrowed is None or not same(value(k).shape[1], 0):
        return frozenset()
    source = narrowed.args[0]
    if not isinstance(source, fx.Node) or source.target is not torch.Tensor.detach:
        return frozenset()
    return frozenset({k, source})
