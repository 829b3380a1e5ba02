"""Warnings about losses of a training step that could not be fused with their head."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from ..engine.canonical import value
from ..engine.insertion import Refused
from ..engine.report import Finding, device_of, source_line
from .losses import Loss

# Below this number of classes the logits take little memory compared with the hidden states.
LEAST_CLASSES = 1024

RETURNED = (
    "Compile a step that returns the loss alone, torch.compile(lambda **batch:"
    ' model(**batch).loss, backend="liger"), or call liger_ops.fuse(model).'
)
WRAPPED = (
    "FSDP2 and DDP make a graph of the model's forward, which returns the logits: call"
    " liger_ops.fuse(model), or fuse(model, norms=False, activations=False, rope=False) to leave"
    " the layers to the backend."
)
ELSEWHERE = (
    "Compile the head and the loss as one function, without a graph break between them, or call"
    " liger_ops.fuse(model)."
)
OTHER = "liger_ops.explain shows what came close, and why it was left."


@dataclass(frozen=True)
class UnfusedLoss(Finding):
    """A loss that a training step computes with all logits in memory at once.

    Attributes:
        advice: what the user can do about it.
    """

    advice: str = OTHER


class NotFusable(Refused):
    """Raised if a loss cannot be fused with its head. `advice` tells the user what to do."""

    def __init__(self, reason: str, advice: str) -> None:
        super().__init__(reason)
        self.advice = advice


def returned_logits(use: str) -> NotFusable:
    """Return the exception for logits that the graph returns."""
    # In a process group the model may have the hooks of FSDP2 or DDP, where graphs end.
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        reason = (
            f"the logits {use}, to the code after the hooks of FSDP2 or DDP if the model has them"
        )
        return NotFusable(reason, WRAPPED)
    return NotFusable(f"the logits {use}", RETURNED)


def check_computed_here(logits: fx.Node) -> None:
    """Raise NotFusable if logits that need a gradient were computed outside of this graph."""
    example = value(logits)
    is_input = logits.op == "placeholder" and isinstance(example, Tensor)
    if is_input and example.requires_grad and not example.is_leaf:
        raise NotFusable(
            "the logits are computed outside of the graph that has the loss", ELSEWHERE
        )


def finding(op: str, loss: Loss, refused: Refused) -> Finding:
    """Return the finding for a loss that is refused."""
    return Finding(op, str(refused), source_line(loss.node), device_of(loss.node))


def refusal(op: str, loss: Loss, refused: Refused) -> Finding:
    """Return the finding for a loss that could not be fused with its head.

    It is an `UnfusedLoss`, which warns, if the loss has a gradient and LEAST_CLASSES or more.
    """
    node, logits = loss.node, value(loss.path.logits)
    # A loss without a gradient is an evaluation, which does not need a warning.
    if value(node).requires_grad and logits.shape[-1] >= LEAST_CLASSES:
        advice = getattr(refused, "advice", OTHER)
        return UnfusedLoss(op, str(refused), source_line(node), device_of(node), advice=advice)
    return finding(op, loss, refused)


_warned: set[str] = set()


def warn(findings: Iterable[Finding]) -> None:
    """Warn once for each line of user code whose training loss could not be fused."""
    for finding in findings:
        if isinstance(finding, UnfusedLoss) and finding.where not in _warned:
            _warned.add(finding.where)
            warnings.warn(
                f"liger_ops: the loss at {finding.where}\nis computed from logits that are whole in"
                f" memory: {finding.reason}. {finding.advice}",
                stacklevel=2,
            )
