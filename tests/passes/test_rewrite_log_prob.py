"""log_prob and linear_log_prob, found in training code: log-probabilities, entropies, and both."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from loss_spellings import V, head_inputs, inputs, with_head
from rewriting import Rewriter, check, each_dtype
from token_spellings import BOTH, ENTROPIES, LOG_PROBS, Spelling

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


@each_dtype
@pytest.mark.parametrize("spelling", SPELLINGS.values(), ids=SPELLINGS)
def test_the_head_is_taken(spelling, dtype):
    function = with_head(spelling)
    found = check(function, *in_range(head_inputs(dtype)), counts={"linear_log_prob": 1})
    assert len(found.calls("linear_log_prob_forward")) == 1
    assert wide_nodes(found) == []
    assert found.findings[0].where


@pytest.mark.parametrize("spelling", SPELLINGS.values(), ids=SPELLINGS)
def test_of_logits(spelling):
    """The op reads the logits as they are."""
    found = check(spelling, *in_range(inputs(torch.bfloat16)), counts={"log_prob": 1})
    (call,) = found.calls("log_prob_forward")
    assert call["logits"].meta["example_value"].dtype is torch.bfloat16
