"""Cross-entropy, with the casts, the scale and the softcap of its logits."""

from __future__ import annotations

import functools

from torch import fx

from .graph_state import GraphState
from .loss_places import of_logits
from .losses import losses, read
from .report import Report
from .rewrite import Refused, attempt
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
