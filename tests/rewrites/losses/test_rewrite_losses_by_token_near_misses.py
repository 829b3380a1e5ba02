"""Near misses of losses of log-probabilities, which do not change."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from loss_spellings import B, Loss, S, V, head_inputs, with_head
from rewriting import Rewriter, check


def rounded_before_nll(logits: Tensor, target: Tensor) -> Tensor:
    log_probs = F.log_softmax(logits.view(-1, V).bfloat16(), -1).float()
    return F.nll_loss(log_probs, target.view(-1))


def of_softmax(logits: Tensor, target: Tensor) -> Tensor:
    return F.nll_loss(logits.softmax(-1).log().view(-1, V), target.view(-1))


def over_positions(logits: Tensor, target: Tensor) -> Tensor:
    return F.nll_loss(F.log_softmax(logits, 1).view(-1, V), target.view(-1))


def over_rows(logits: Tensor, target: Tensor) -> Tensor:
    return F.nll_loss(F.log_softmax(logits.view(-1, V), 0), target.view(-1))


def returned(logits: Tensor, target: Tensor) -> Any:
    log_probs = F.log_softmax(logits, -1)
    return F.nll_loss(log_probs.view(-1, V), target.view(-1)), log_probs


def of_two_targets(logits: Tensor, target: Tensor) -> Tensor:
    log_probs, labels = F.log_softmax(logits, -1), target.clamp(min=0).unsqueeze(-1)
    return log_probs.gather(-1, labels).mean() - log_probs.gather(-1, 10 - labels).mean()


def of_the_three_largest(logits: Tensor, target: Tensor) -> Tensor:
    labels = target.clamp(min=0).unsqueeze(-1).expand(-1, -1, 3)
    return F.log_softmax(logits, -1).gather(-1, labels).mean()


def of_some_positions(logits: Tensor, target: Tensor) -> Tensor:
    """gather accepts an index with fewer positions than its input."""
    return F.log_softmax(logits, -1).gather(-1, target[:, 1:].clamp(min=0).unsqueeze(-1)).mean()


def rounded_before_gather(logits: Tensor, target: Tensor) -> Tensor:
    log_probs = F.log_softmax(logits.bfloat16(), -1).float()
    return log_probs.gather(-1, target.clamp(min=0).unsqueeze(-1)).mean()


def summed_in_float64(logits: Tensor, target: Tensor) -> Tensor:
    log_probs = F.log_softmax(logits, -1)
    chosen = log_probs.gather(-1, target.clamp(min=0).unsqueeze(-1))
    return chosen.mean() + log_probs.sum(-1, dtype=torch.float64).mean()


def summed_over_positions(logits: Tensor, target: Tensor) -> Tensor:
    log_probs = F.log_softmax(logits, -1)
    chosen = log_probs.gather(-1, target.clamp(min=0).unsqueeze(-1))
    return chosen.mean() + log_probs.sum(1).mean()


def used_before_its_targets(logits: Tensor, target: Tensor) -> Tensor:
    lse = torch.logsumexp(logits, -1)
    labels = target.clamp(min=0) + (lse > 1e6)
    return (lse - logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1)).mean()


def computed_twice(logits: Tensor, target: Tensor) -> Tensor:
    """One of two equal parts is written in place."""
    chosen = logits.gather(-1, target.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    first, second = logits.logsumexp(-1), logits.logsumexp(-1)
    return (first.detach().zero_() + second - chosen).mean()


NEAR: dict[str, tuple[str, Loss, str]] = {
    "rounded": ("cross_entropy", rounded_before_nll, "are cast between"),
    "softmax-then-log": ("cross_entropy", of_softmax, "not known to be log_softmax"),
    "over-positions": ("cross_entropy", over_positions, "not known to be log_softmax"),
    "over-rows": ("cross_entropy", over_rows, "not known to be log_softmax"),
    "returned": ("cross_entropy", returned, "the log-probabilities are returned"),
    "two-targets": ("log_prob", of_two_targets, "several targets"),
    "three-largest": ("log_prob", of_the_three_largest, "not one for each position"),
    "some-positions": ("log_prob", of_some_positions, "not one for each position"),
    "rounded-before-gather": ("log_prob", rounded_before_gather, "are cast between"),
    "float64": ("cross_entropy", summed_in_float64, "are summed in torch.float64"),
    "summed-over-positions": ("log_prob", summed_over_positions, "are used by sum_1 too"),
    "computed-twice": ("cross_entropy", computed_twice, "computed twice"),
    "used-before": ("log_prob", used_before_its_targets, "before its targets are known"),
}


@pytest.mark.parametrize(("op", "loss", "reason"), NEAR.values(), ids=NEAR)
def test_losses_that_come_close(op, loss, reason):
    found = check(with_head(loss), *head_inputs(), counts={})
    for name in (op, f"linear_{op}"):
        assert found.reasons(name) and all(reason in one for one in found.reasons(name))


def written_between(logits: Tensor, target: Tensor) -> Tensor:
    log_probs, labels = F.log_softmax(logits, -1), target.clamp(min=0).unsqueeze(-1)
    chosen = log_probs.gather(-1, labels)
    labels.zero_()
    return chosen.mean() + log_probs.sum(-1).mean()


def test_labels_that_are_written_between_the_parts():
    x, weight, target = head_inputs()
    found = check(with_head(written_between), x.detach(), weight.detach(), target, counts={})
    assert "written in place" in found.reasons("linear_cross_entropy")[0]


def test_positions_that_are_regrouped_after_the_head():
    """The targets have the positions of the logits, and the head has others."""

    def loss(logits: Tensor, target: Tensor) -> Tensor:
        index = target.clamp(min=0).view(S, B, 1)
        return logits.view(S, B, V).log_softmax(-1).gather(-1, index).mean()

    check(with_head(loss), *head_inputs(), counts={"log_prob": 1})


def picked(logits: Tensor, target: Tensor) -> Tensor:
    """One logit per token is not a loss, and neither is logsumexp alone."""
    return (
        logits.gather(-1, target.clamp(min=0).unsqueeze(-1)).sum()
        + logits.tanh().logsumexp(-1).sum()
    )


def of_other_logits(logits: Tensor, target: Tensor) -> Tensor:
    chosen = logits.gather(-1, target.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return (chosen - (logits * 2).logsumexp(-1)).sum()


@pytest.mark.parametrize("function", [picked, of_other_logits])
def test_what_is_no_loss(function):
    assert check(with_head(function), *head_inputs(), counts={}).findings == []


def test_what_is_refused_leaves_the_graph_as_it_came():
    """Also after nodes were inserted."""
    found = check(with_head(summed_in_float64), *head_inputs(), counts={})
    untouched = Rewriter(["rope"])
    torch._dynamo.reset()
    torch.compile(with_head(summed_in_float64), backend=untouched)(*head_inputs())
    code = [str(one.graphs[0].graph) for one in (found, untouched)]
    assert code[0] == code[1]
