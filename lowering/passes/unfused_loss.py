"""Losses of a training step whose head is known, and stays apart from them all the same."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor, fx

from .canonical import value
from .losses import Loss
from .report import Finding, device_of, source_line
from .rewrite import Refused

# With fewer classes than a vocabulary has, the logits take little memory beside the hidden states.
LEAST_CLASSES = 1024

RETURNED = (
    "Compile a step that returns the loss alone, torch.compile(lambda **batch:"
    ' model(**batch).loss, backend="liger"), or call liger_ops.fuse(model).'
)
ELSEWHERE = (
    "Compile the head and the loss as one function, without a graph break between them, or call"
    " liger_ops.fuse(model)."
)
OTHER = "liger_ops.explain shows what came close, and why it was left."


@dataclass(frozen=True)
class UnfusedLoss(Finding):
    """A loss that a training step computes from all of its logits in memory.

    Attributes:
        advice: what to do about it.
    """

    advice: str = OTHER


class Apart(Refused):
    """Why a loss stays apart from its head, and what to do about it."""

    def __init__(self, reason: str, advice: str) -> None:
        super().__init__(reason)
        self.advice = advice


def check_made_here(logits: fx.Node) -> None:
    """Raise Apart where logits that have a gradient were computed, but not in their graph."""
    known = value(logits)
    given = logits.op == "placeholder" and isinstance(known, Tensor)
    if given and known.requires_grad and not known.is_leaf:
        raise Apart("the logits are computed outside of the graph that has the loss", ELSEWHERE)


def refusal(op: str, loss: Loss, refused: Refused) -> Finding:
    """What a report has of a loss whose head is known, and is not fused with it."""
    node, logits = loss.node, value(loss.chain.logits)
    finding = (op, str(refused), source_line(node), device_of(node))
    # Without a gradient it is an evaluation, whose logits are wanted or few.
    if value(node).requires_grad and logits.shape[-1] >= LEAST_CLASSES:
        return UnfusedLoss(*finding, getattr(refused, "advice", OTHER))
    return Finding(*finding)


_told: set[str] = set()


def warn(findings: Iterable[Finding]) -> None:
    """Warn of each line of a user's code whose loss stays unfused in training, once."""
    for finding in findings:
        if isinstance(finding, UnfusedLoss) and finding.where not in _told:
            _told.add(finding.where)
            warnings.warn(
                f"liger_ops: the loss at {finding.where}\nis computed from logits that are whole in"
                f" memory: {finding.reason}. {finding.advice}",
                stacklevel=2,
            )
