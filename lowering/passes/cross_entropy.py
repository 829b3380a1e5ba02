"""Cross-entropy, with the casts, the scale and the softcap of its logits."""

from __future__ import annotations

from torch import fx

from .graph_state import GraphState
from .loss_chain import positions
from .loss_places import place, put
from .losses import Loss, losses, read
from .report import Report
from .rewrite import Refused, attempt

OP = "cross_entropy"


def rewrite(graph: fx.Graph, report: Report) -> None:
    for node in report.visiting(OP, losses(graph)):
        try:
            with attempt(graph):
                loss = read(node)
                if loss is not None:
                    report.used(OP, _replaced(loss, GraphState(graph)))
        except Refused as refused:
            report.refused(OP, node, str(refused))


def _replaced(loss: Loss, state: GraphState) -> fx.Node:
    chain = loss.chain
    at = place(loss, chain.nodes, [chain.logits], "logits", state)
    return put(loss, OP, (positions(chain.logits, chain, at),), (), at, chain.nodes, state)
