"""The language model's head and its loss, where nothing else needs the logits."""

from __future__ import annotations

import torch
from torch import fx

from .canonical import canonical, is_tensor, same, value
from .graph_state import GraphState
from .loss_chain import Loss, check_place, losses, outside_user, positions, read
from .report import Report
from .rewrite import Refused, attempt, put_loss

OP = "linear_cross_entropy"


def rewrite(graph: fx.Graph, report: Report) -> None:
    for node in report.visiting(OP, losses(graph)):
        try:
            loss = read(node)
            call = canonical(loss.chain.logits)
            if call is not None and call.op == "linear":
                with attempt(graph):
                    report.used(OP, _replaced(loss, call.args, GraphState(graph)))
        except Refused as refused:
            report.refused(OP, node, str(refused))


def _replaced(loss: Loss, linear: tuple[fx.Node, ...], state: GraphState) -> fx.Node:
    chain, at = loss.chain, loss.node
    x, weight, bias = linear
    nodes = (*chain.nodes, chain.logits)
    user = outside_user(nodes)
    if user is not None:
        who = "are returned" if user.op == "output" else f"are used by {user.name} too"
        raise Refused(f"the logits {who}")
    if not is_tensor(x) or not same(value(chain.logits).shape[-1], value(weight).shape[0]):
        raise Refused("the logits are not those of one linear layer")
    inputs = [one for one in (x, weight, bias) if one is not None]
    check_place(loss, nodes, inputs, "head", state)
    args = (positions(x, chain, at), weight, loss.target, bias, *loss.options)
    return put_loss(at, torch.ops.liger.linear_cross_entropy.default, args, {*nodes}, state)
