"""The rewrites to ops of losses and of log-probabilities and entropies of tokens.

An op takes logits, with their casts, scales and softcap; or it takes the head that computes them,
if nothing else uses the logits.
"""

from __future__ import annotations

import functools

from torch import fx

from ..engine.graph_state import GraphState
from ..engine.report import HEADS, Report
from ..engine.rewrite import Refused, attempt
from .insert_loss_op import of_logits, with_head
from .losses import losses, read
from .token_losses import rewrite_tokens
from .unfused_loss import finding, refusal


def rewrite(op: str, graph: fx.Graph, report: Report) -> None:
    replaced = functools.partial(with_head if op in HEADS else of_logits, op)
    refused_as = refusal if op in HEADS else finding
    family = op.removeprefix("linear_")
    for node in report.visiting(op, losses(graph) if family == "cross_entropy" else ()):
        loss = None
        try:
            with attempt(graph):
                loss = read(node)
                if (new := replaced(loss, GraphState(graph))) is not None:
                    report.used(op, new)
        except Refused as refused:
            if loss is None:
                report.refused(op, node, str(refused))
            else:
                report.findings.append(refused_as(op, loss, refused))
    rewrite_tokens(graph, report, op, family, replaced, refused_as)
