"""Mixtures of experts whose rows are gathered, as transformers' `grouped_mm` and `batched_mm` do.

Each token has K rows, one for each of its experts. `grouped_mm` sorts the rows by expert,
multiplies each group by the weights of its expert, and undoes the order; `batched_mm` gathers the
weights of each row. `ExpertReader` follows the code back from the sum over a token's rows to the
hidden states, the numbers of the experts and their scores. The activation between the two products
is matched by the patterns of gated activations.
"""

from __future__ import annotations

import torch
from torch import fx

from ..engine import casts
from ..engine.canonical import calls, is_tensor, value
from ..engine.graph_state import GraphState
from ..engine.insertion import Refused, derive
from ..engine.reading import nodes_before
from ..engine.report import Report
from ..engine.rewrite import emit, reported
from .expert_reader import ExpertReader, is_product

OP = "moe_experts"
# Most operations between a product and the sum over a token's rows.
FURTHEST = 7


def rewrite(graph: fx.Graph, report: Report) -> None:
    state: GraphState | None = None
    for total in report.visiting(OP, list(graph.nodes)):
        if total._erased or not _is_like_experts(total):
            continue
        state = state or GraphState(graph)
        if not state.transformed(total):
            with reported(graph, report, OP, total):
                report.used(OP, _replace(total, state))


def _is_like_experts(node: fx.Node) -> bool:
    """Return whether a node sums rows after a product by the weights of experts."""
    total = calls(node, "sum")
    if total is None or total.args[1] != (-2,) or not is_tensor(total.args[0], dim=3):
        return False
    return any(is_product(before) for before in nodes_before(node, FURTHEST))


def _replace(total: fx.Node, state: GraphState) -> fx.Node:
    reader = ExpertReader(state)
    with state.modes_of(total):
        found = reader.experts(total)
    x, up, down, ids, scores, options = found
    root = _root(total, value(down.node).dtype)
    # grouped_mm is no operation that autocast knows.
    with casts.modes_of(root, state, outside=reader.is_grouped) as is_outside:
        rows = x
        if reader.is_grouped and value(x).dtype != value(up.weight).dtype:
            rows = derive(root, torch.Tensor.to, x, value(up.weight).dtype)
        weights = [
            derive(root, torch.transpose, p.weight, 1, 2) if p.is_transposed else p.weight
            for p in (up, down)
        ]
        args = (rows, *weights, ids, scores, up.bias, down.bias, *options)
        new = emit(root, torch.ops.liger.moe_experts.default, args)
        inputs = [x, up.weight, down.weight, ids, scores, up.bias, down.bias]
        if root is not total:
            reader.nodes |= {root}
        reader.replace(root, new, inputs)
    if is_outside:
        casts.mark(new)
    return new


def _root(total: fx.Node, dtype: torch.dtype) -> fx.Node:
    """Return the node that the op replaces: the sum, or its cast to `dtype`, which the op has."""
    if value(total).dtype == dtype:
        return total
    cast = next(iter(total.users)) if len(total.users) == 1 else None
    if cast is None or calls(cast, "cast") is None or value(cast).dtype != dtype:
        raise Refused(f"its sum stays in {value(total).dtype}, and that of the op is in {dtype}")
    return cast
