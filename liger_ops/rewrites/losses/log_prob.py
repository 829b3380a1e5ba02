"""Log-probabilities and entropies of tokens, with the casts, scales and softcap of their logits."""

from __future__ import annotations

import functools

from torch import fx

from ..engine.report import Report
from .insert_loss_op import of_logits
from .token_losses import rewrite_tokens
from .unfused_loss import finding

OP = "log_prob"


def rewrite(graph: fx.Graph, report: Report) -> None:
    rewrite_tokens(graph, report, OP, "log_prob", functools.partial(of_logits, OP), finding)
