"""Cross-entropy, with the casts, the scale and the softcap of its logits."""

from __future__ import annotations

import torch
from torch import fx

from .graph_state import GraphState
from .loss_chain import Loss, check_place, losses, positions, read
from .report import Report
from .rewrite import Refused, attempt, put_loss

OP = "cross_entropy"


def rewrite(graph: fx.Graph, report: Report) -> None:
    for node in report.visiting(OP, losses(graph)):
        try:
            with attempt(graph):
                report.used(OP, _replaced(read(node), GraphState(graph)))
        except Refused as refused:
            report.refused(OP, node, str(refused))


def _replaced(loss: Loss, state: GraphState) -> fx.Node:
    chain, at = loss.chain, loss.node
    check_place(loss, chain.nodes, [chain.logits], "logits", state)
    args = (positions(chain.logits, chain, at), loss.target, *loss.options)
    return put_loss(at, torch.ops.liger.cross_entropy.default, args, {*chain.nodes}, state)
