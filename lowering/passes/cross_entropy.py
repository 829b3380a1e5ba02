"""Cross-entropy, with the casts, the scale and the softcap of its logits."""

from __future__ import annotations

import torch
from torch import fx

from .graph_state import GraphState, eliminate_dead_code
from .loss_chain import Loss, losses, positions, read
from .report import Report
from .rewrite import Refused, put_loss

OP = "cross_entropy"


def rewrite(graph: fx.Graph, report: Report) -> None:
    for node in losses(graph):
        try:
            report.used(OP, _replaced(read(node), GraphState(graph)))
        except Refused as refused:
            report.refused(OP, node, str(refused))
    eliminate_dead_code(graph)


def _replaced(loss: Loss, state: GraphState) -> fx.Node:
    chain, at = loss.chain, loss.node
    computed = [node for node in chain.nodes if node is not at]
    if not state.one_mode(chain.nodes):
        raise Refused("the loss and its logits are computed in different autocast modes")
    first = min([*computed, at], key=state.order.__getitem__)
    if state.written([*computed, chain.logits, loss.target], first, at):
        raise Refused("a tensor is written in place between the logits and the loss")
    args = (
        positions(chain.logits, chain, at),
        loss.target,
        loss.class_weight,
        None,
        None,
        loss.options["ignore_index"],
        loss.options["reduction"],
        loss.options["label_smoothing"],
        0.0,
        chain.softcap,
        chain.scale,
    )
    return put_loss(at, torch.ops.liger.cross_entropy.default, args, state)
