"""Near misses of losses of logits or of a head: not rewritten, or only in part."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from loss_spellings import (
    B,
    Loss,
    S,
    V,
    head_inputs,
    inputs,
    plain,
    sliced,
    transformers,
    with_head,
)
from rewriting import Rewriter, check, each_dtype


def test_a_product_with_what_is_not_turned_is_no_head():
    def function(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return transformers(x @ weight, target)

    x, weight, target = head_inputs()
    check(function, x, weight.t().contiguous(), target, counts={"cross_entropy": 1})


def and_logits(x: Tensor, weight: Tensor, target: Tensor) -> Any:
    logits = F.linear(x, weight)
    return transformers(logits, target), logits


def and_wide_logits(x: Tensor, weight: Tensor, target: Tensor) -> Any:
    logits = F.linear(x, weight).float()
    return plain(logits, target), logits


def and_prediction(x: Tensor, weight: Tensor, target: Tensor) -> Any:
    logits = F.linear(x, weight)
    return transformers(logits, target), logits.argmax(-1)


def and_capped_logits(x: Tensor, weight: Tensor, target: Tensor) -> Any:
    logits = torch.tanh(F.linear(x, weight) / 30.0) * 30.0
    return transformers(logits, target), logits


def two_losses(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    logits = F.linear(x, weight)
    return transformers(logits, target) + torch.logsumexp(logits, -1).square().mean()


USED_ELSEWHERE = {
    "returned": (and_logits, "the logits are returned"),
    "returned-wide": (and_wide_logits, "the logits are returned"),
    "returned-capped": (and_capped_logits, "the logits are returned"),
    "argmax": (and_prediction, "the logits are used by argmax too"),
    "z-loss": (two_losses, "used by logsumexp too"),
}


@each_dtype
@pytest.mark.parametrize(("function", "reason"), USED_ELSEWHERE.values(), ids=USED_ELSEWHERE)
def test_logits_that_are_needed(function, reason, dtype):
    """The loss becomes cross_entropy, and the head stays."""
    found = check(function, *head_inputs(dtype), counts={"cross_entropy": 1})
    (given,) = found.reasons("linear_cross_entropy")
    assert reason in given


def test_two_losses_of_the_same_logits():
    function = with_head(lambda logits, target: plain(logits, target) + sliced(logits, target))
    found = check(function, *head_inputs(), counts={"cross_entropy": 2})
    assert len(found.reasons("linear_cross_entropy")) == 2


def probabilities(logits: Tensor, target: Tensor) -> Tensor:
    rows = logits.view(-1, V)
    return F.cross_entropy(rows, F.softmax(rows.detach() * target.view(-1, 1), -1))


def by_channels(logits: Tensor, target: Tensor) -> Tensor:
    """(B, V, S), PyTorch's layout for images."""
    return F.cross_entropy(logits.view(B, V, S), target)


REFUSED: dict[str, tuple[Loss, str]] = {
    "probabilities": (probabilities, "not rows with one target each"),
    "by-channels": (by_channels, "the classes are the second dimension"),
    "one-row": (
        lambda logits, target: F.cross_entropy(logits[0, 1], target[0, 1]),
        "not rows with one target each",
    ),
}


@pytest.mark.parametrize(("loss", "reason"), REFUSED.values(), ids=REFUSED)
def test_losses_that_are_refused(loss, reason):
    found = check(loss, *inputs(), counts={})
    assert len(found.reasons("cross_entropy")) == 1
    assert reason in found.reasons("cross_entropy")[0]
    check(with_head(loss), *head_inputs(), counts={})


def capped_then_scaled(logits: Tensor, target: Tensor) -> Tensor:
    """In the op the softcap comes last, so this is another function."""
    return transformers(torch.tanh(logits / 3.0) * 3.0 * 0.5, target)


def capped_twice(logits: Tensor, target: Tensor) -> Tensor:
    capped = torch.tanh(logits / 3.0) * 3.0
    return transformers(torch.tanh(capped / 2.0) * 2.0, target)


def in_float64(logits: Tensor, target: Tensor) -> Tensor:
    """The op computes in float64 for float64 logits only."""
    return plain(logits.double(), target)


def mixed(logits: Tensor, target: Tensor) -> Tensor:
    """A view that mixes the vocabulary with the positions."""
    rows = logits.transpose(1, 2).reshape(-1, V)
    return F.cross_entropy(rows, target.view(-1))


def regrouped(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.view(B, V, S).contiguous().view(-1, V), target.view(-1))


def of_some_classes(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits[..., :7].reshape(-1, 7), target.view(-1).clamp(max=6))


def of_one_chunk(logits: Tensor, target: Tensor) -> Tensor:
    first, _ = logits.split([7, 4], dim=-1)
    return F.cross_entropy(first.reshape(-1, 7), target.view(-1).clamp(max=6))


def of_a_chunk_of_positions(logits: Tensor, target: Tensor) -> Tensor:
    first, _ = logits.split([3, 2], dim=1)
    return F.cross_entropy(first.reshape(-1, V), target[:, :3].reshape(-1))


def of_every_second_position(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, ::2].reshape(-1, V), target[:, ::2].reshape(-1))


def of_some_of_two_dimensions(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits[1:, -3:].reshape(-1, V), target[1:, -3:].flatten())


def of_chosen_positions(logits: Tensor, target: Tensor) -> Tensor:
    chosen = torch.tensor([0, 3])
    return F.cross_entropy(logits[:, chosen].view(-1, V), target[:, chosen].view(-1))


def partly_without_gradient(logits: Tensor, target: Tensor) -> Tensor:
    with torch.no_grad():
        logits = torch.tanh(logits / 3.0) * 3.0
    return transformers(logits, target)


BROKEN: dict[str, tuple[Loss, int]] = {
    "capped-then-scaled": (capped_then_scaled, 0),
    "capped-twice": (capped_twice, 0),
    "two-caps": (lambda logits, target: transformers(torch.tanh(logits / 3.0) * 4.0, target), 0),
    "negated": (lambda logits, target: transformers(logits * -1.0, target), 0),
    "scaled-by-a-tensor": (
        lambda logits, target: transformers(logits * logits.detach().abs().mean(), target),
        0,
    ),
    "rounded": (lambda logits, target: transformers(logits.to(torch.bfloat16), target), 0),
    "in-float64": (in_float64, 0),
    "mixed": (mixed, 0),
    "regrouped": (regrouped, 0),
    "some-classes": (of_some_classes, 0),
    "one-chunk-of-classes": (of_one_chunk, 0),
    "one-chunk-of-positions": (of_a_chunk_of_positions, 0),
    "every-second-position": (of_every_second_position, 1),
    "chosen-positions": (of_chosen_positions, 0),
    "two-dimensions": (of_some_of_two_dimensions, 0),
    "sliced-after-a-view": (
        lambda logits, target: F.cross_entropy(logits.view(-1, V)[1:], target.view(-1)[1:]),
        0,
    ),
}


@pytest.mark.parametrize(("loss", "head"), BROKEN.values(), ids=BROKEN)
def test_chains_that_do_not_reach_the_head(loss, head):
    """Other uses of the logits stay, and the loss still becomes cross_entropy."""
    found = check(loss, *inputs(), counts={"cross_entropy": 1})
    (call,) = found.calls("cross_entropy")
    assert call["softcap"] in (None, 2.0)
    counts = {"linear_cross_entropy": 1} if head else {"cross_entropy": 1}
    check(with_head(loss), *head_inputs(), counts=counts)


def test_logits_in_another_gradient_mode():
    found = check(partly_without_gradient, *inputs(), counts={})
    assert "modes" in found.reasons("cross_entropy")[0]


def test_logits_under_autocast():
    """Its head multiplies in bfloat16; the loss outside is of those logits."""

    def function(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            logits = F.linear(x, weight)
        return transformers(logits, target)

    rewriter = Rewriter()
    torch._dynamo.reset()
    arguments = [one.detach() for one in head_inputs()]
    loss = torch.compile(function, backend=rewriter, fullgraph=True)(*arguments)
    assert rewriter.counts() == {"cross_entropy": 1}
    assert "autocast" in rewriter.reasons("linear_cross_entropy")[0]
    # Log-sum-exp and one logit, in float32, of the same bfloat16 logits.
    exact = function(*arguments)
    assert math.isclose(loss, exact, rel_tol=1e-6)
