"""The head of a language model and its cross-entropy, if nothing else uses the logits."""

from __future__ import annotations

import functools

from torch import fx

from ..engine.graph_state import GraphState
from ..engine.report import Report
from ..engine.rewrite import Refused, attempt
from .insert_loss_op import with_head
from .losses import losses, read
from .token_losses import rewrite_tokens
from .unfused_loss import refusal

OP = "linear_cross_entropy"


def rewrite(graph: fx.Graph, report: Report) -> None:
    for node in report.visiting(OP, losses(graph)):
        loss = None
        try:
            with attempt(graph):
                loss = read(node)
                new = with_head(OP, loss, GraphState(graph))
                if new is not None:
                    report.used(OP, new)
        except Refused as refused:
            if loss is None:
                report.refused(OP, node, str(refused))
            else:
                report.findings.append(refusal(OP, loss, refused))
    rewrite_tokens(graph, report, OP, "cross_entropy", functools.partial(with_head, OP), refusal)
