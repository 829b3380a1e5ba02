"""log_prob and linear_log_prob, found in training code: log-probabilities, entropies, and both."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from loss_spellings import V, head_inputs, inputs, with_head
from rewriting import Rewriter, check, each_dtype
from token_spellings import (
    BOTH,
    ENTROPIES,
    LOG_PROBS,
    METRICS,
    Spelling,
    by_logsumexp,
    shared_log_probs,
    trl_both,
    verl_both,
)

SPELLINGS: dict[str, Spelling] = {
    **{f"log-prob-{name}": one for name, one in LOG_PROBS.items()},
    **{
        f"entropy-{name}": lambda logits, labels, one=one: one(logits)
        for name, one in ENTROPIES.items()
    },
    **{f"both-{name}": one for name, one in BOTH.items()},
}


def in_range(arguments: list[Tensor]) -> list[Tensor]:
    *tensors, labels = arguments
    return [*tensors, labels.clamp(min=0)]


def wide_nodes(found: Rewriter) -> list[torch.fx.Node]:
    """The nodes with a tensor of the size of the logits."""
    return [
        node
        for node in found.nodes()
        if isinstance(made := node.meta.get("example_value"), Tensor)
        and node.op != "placeholder"
        and V in made.shape
    ]


@pytest.mark.quick(rewrites=("linear_log_prob",))
@each_dtype
@pytest.mark.parametrize("spelling", SPELLINGS.values(), ids=SPELLINGS)
def test_the_head_is_taken(spelling, dtype):
    function = with_head(spelling)
    found = check(function, *in_range(head_inputs(dtype)), counts={"linear_log_prob": 1})
    assert len(found.calls("linear_log_prob_forward")) == 1
    assert wide_nodes(found) == []
    assert found.findings[0].where


@pytest.mark.quick(rewrites=("log_prob",))
@pytest.mark.parametrize("spelling", SPELLINGS.values(), ids=SPELLINGS)
def test_of_logits(spelling):
    """The op reads the logits as they are."""
    found = check(spelling, *in_range(inputs(torch.bfloat16)), counts={"log_prob": 1})
    (call,) = found.calls("log_prob_forward")
    assert call["logits"].meta["example_value"].dtype is torch.bfloat16


@pytest.mark.parametrize("spelling", METRICS.values(), ids=METRICS)
def test_entropies_without_a_gradient(spelling):
    """They come from the call that has the gradient, and have none."""
    found = check(with_head(spelling), *in_range(head_inputs()), counts={"linear_log_prob": 1})
    assert wide_nodes(found) == []


def test_an_evaluation():
    def function(x: Tensor, weight: Tensor, labels: Tensor) -> Any:
        with torch.no_grad():
            return trl_both(F.linear(x, weight), labels)

    check(function, *in_range(head_inputs()), counts={"linear_log_prob": 1})


def test_a_metric_alone():
    """The head runs with gradients and the entropy without."""

    def function(logits: Tensor) -> Tensor:
        logits = logits.float() / 0.7
        with torch.no_grad():
            return by_logsumexp(logits)

    x, weight, _ = head_inputs()
    check(lambda x, weight: function(F.linear(x, weight)), x, weight, counts={"linear_log_prob": 1})


@pytest.mark.parametrize("spelling", [shared_log_probs, trl_both, verl_both])
@pytest.mark.parametrize("head", [False, True], ids=["logits", "head"])
def test_any_length(head, spelling):
    """One graph, though the code reads the sizes of the logits."""
    function, arguments = (with_head(spelling), head_inputs) if head else (spelling, inputs)
    op = "linear_log_prob" if head else "log_prob"
    then = in_range(arguments(length=6))
    check(function, *in_range(arguments()), counts={op: 1}, then=then, dynamic=True)


def test_a_temperature_that_changes():
    """One graph for all, which divides the logits; the op would compile again for each."""

    def function(x: Tensor, weight: Tensor, labels: Tensor, temperature: float) -> Any:
        return shared_log_probs(F.linear(x, weight) / temperature, labels)

    arguments = in_range(head_inputs())
    then = (*arguments, 0.9)
    found = check(function, *arguments, 0.7, counts={"log_prob": 1}, then=then, dynamic=True)
    assert "may differ from call to call" in found.reasons("linear_log_prob")[0]


def picked(log_p: Tensor, target: Tensor) -> Tensor:
    return log_p.gather(-1, target.unsqueeze(-1)).squeeze(-1)


def picked_and_summed(log_p: Tensor, target: Tensor) -> Tensor:
    return picked(log_p, target) + 0.1 * log_p.sum(-1)


@pytest.mark.parametrize(
    ("loss", "op"), ((picked, "log_prob"), (picked_and_summed, "cross_entropy"))
)
@pytest.mark.parametrize("lowest", (torch.finfo(torch.float32).min, -1e30, -1e4))
def test_a_row_with_nothing_allowed(loss, op, lowest):
    """Its classes are equally probable, however low their logits are."""

    def function(logits: Tensor, target: Tensor, allowed: Tensor) -> Tensor:
        return loss(logits.masked_fill(~allowed, lowest).log_softmax(-1), target)

    allowed = torch.tensor([True, False, True]).unsqueeze(-1)
    logits = torch.randn(3, 5, requires_grad=True)
    check(function, logits, torch.tensor([1, 0, 4]), allowed, counts={op: 1})
