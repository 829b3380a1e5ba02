"""A residual addition and the rms_norm of the sum, in one op that returns the norm and the sum.

Runs after the rewrite rms_norm, on the ops that it inserted and on those of the user's code.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ..engine.canonical import calls, is_tensor, same, value
from ..engine.graph_state import GraphState
from ..engine.insertion import Refused, insert, items, run
from ..engine.outside_autocast import mark, modes_of
from ..engine.report import Report
from ..engine.rewrite import foreign, replace, reported

OP = "fused_add_rms_norm"


def rewrite(graph: fx.Graph, report: Report) -> None:
    state = GraphState(graph)
    for norm in report.visiting(OP, list(graph.nodes)):
        if (norm_call := calls(norm, "liger.rms_norm")) is None:
            continue
        total, *options = norm_call.args
        add_call = calls(total, "add")
        if add_call is None or not all(map(is_tensor, add_call.args)):
            continue
        if state.transformed(norm):
            continue
        with reported(graph, report, OP, norm):
            _fuse(norm, total, options, add_call.args, state, report)


def _fuse(
    norm: fx.Node, total: fx.Node, options: list[Any], terms: tuple[Any, ...],
    state: GraphState, report: Report,
) -> None:  # fmt: skip
    if not all(same(tuple(value(term).shape), tuple(value(total).shape)) for term in terms):
        raise Refused("the residual is broadcast")
    # The op goes before the first use of the sum, so all its arguments must be computed by then.
    first = min(total.users, key=state.order.__getitem__)
    late = [
        argument
        for argument in norm.all_input_nodes
        if argument is not total and state.order[argument] >= state.order[first]
    ]
    if late:
        raise Refused(f"{late[0].name} is computed only after the sum is used, by {first.name}")
    if reason := foreign([*terms, *norm.all_input_nodes]):
        raise Refused(reason)
    if not state.one_mode([total, norm, first]):
        raise Refused("the sum and the norm run in different gradient or autocast modes")
    if state.written([total, *terms, *norm.all_input_nodes], total, norm):
        raise Refused("a tensor is written in place between the sum and the norm")
    target, args = torch.ops.liger.fused_add_rms_norm.default, (*terms, *options)
    with modes_of(norm, state) as is_outside:
        results = run(target, args)
    fused = insert(first, target, args, results)
    if is_outside:
        mark(fused)
    fused.meta.update({key: norm.meta[key] for key in ("stack_trace",) if key in norm.meta})
    y, s = items(fused, 2)
    replace([(norm, y), (total, s)], {norm, total}, state)
    report.superseded(norm)
    report.used(OP, fused)
