"""The head of a language model with log-probabilities and entropies of its tokens, if nothing else
uses the logits."""

from __future__ import annotations

import functools

from torch import fx

from ..engine.report import Report
from .insert_loss_op import with_head
from .token_losses import rewrite_tokens
from .unfused_loss import refusal

OP = "linear_log_prob"


def rewrite(graph: fx.Graph, report: Report) -> None:
    rewrite_tokens(graph, report, OP, "log_prob", functools.partial(with_head, OP), refusal)
