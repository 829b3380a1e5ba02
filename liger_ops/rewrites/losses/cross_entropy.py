"""Cross-entropy, with the casts, the scale and the softcap of its logits."""

from __future__ import annotations

import functools

from torch import fx

from ..engine.graph_state import GraphState
from ..engine.report import Report
from ..engine.rewrite import Refused, attempt
from .insert_loss_op import of_logits
from .losses import losses, read
from .token_losses import rewrite_tokens
from .unfused_loss import finding

OP = "cross_entropy"


def rewrite(graph: fx.Graph, report: Report) -> None:
    for node in report.visiting(OP, losses(graph)):
        try:
            with attempt(graph):
                report.used(OP, of_logits(OP, read(node), GraphState(graph)))
        except Refused as refused:
            report.refused(OP, node, str(refused))
    rewrite_tokens(graph, report, OP, "cross_entropy", functools.partial(of_logits, OP), finding)
