"""Losses of logits, heads and labels with writes in place between the nodes of a match."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from loss_spellings import Loss, V, head_inputs, inputs, plain
from rewriting import Rewriter, check


def written_logits(logits: Tensor, target: Tensor) -> Tensor:
    logits = logits * 1.0
    rows = logits.view(-1, V)
    logits.mul_(2)
    return F.cross_entropy(rows, target.view(-1))


def masked_logits(logits: Tensor, target: Tensor) -> Tensor:
    logits = logits.float() * 1.0
    wide = torch.tanh(logits / 3.0) * 3.0
    logits[:, 0] = 0.0
    return plain(wide, target) + logits.sum()


def test_written_logits():
    logits, target = inputs()
    found = check(masked_logits, logits.detach(), target, counts={})
    assert "written in place" in found.reasons("cross_entropy")[0]
    # A view of a tensor sees what is written to the tensor.
    assert_right_without_head(written_logits)


def assert_right_without_head(loss: Loss) -> Rewriter:
    logits, target = inputs()
    torch._dynamo.reset()
    found = Rewriter()
    compiled = torch.compile(loss, backend=found, fullgraph=True)
    torch.testing.assert_close(
        compiled(logits.detach().clone(), target), loss(logits.detach().clone(), target)
    )
    return found


def test_a_written_head():
    def function(x: Tensor, weight: Tensor, target: Tensor) -> Any:
        weight = weight * 1.0
        logits = F.linear(x, weight)
        weight.mul_(2)
        return plain(logits, target), weight

    x, weight, target = head_inputs()
    found = check(function, x.detach(), weight.detach(), target, counts={"cross_entropy": 1})
    assert "written in place" in found.reasons("linear_cross_entropy")[0]


def test_written_labels():
    """Writes before the head and after the loss."""

    def function(x: Tensor, weight: Tensor, target: Tensor) -> Any:
        target = target.clone()
        target[:, 0] = -100
        loss = plain(F.linear(x, weight), target)
        target[:, 1] = -100
        return loss, target

    x, weight, target = head_inputs()
    counts = {"linear_cross_entropy": 1}
    check(function, x.detach(), weight.detach(), target, counts=counts)


def test_labels_written_after_the_head():
    def function(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        logits = F.linear(x, weight)
        target = target.clone()
        target[:, 0] = -100
        return plain(logits, target)

    check(function, *head_inputs(), counts={"linear_cross_entropy": 1})
