"""Losses of log-probabilities: nll_loss, and token by token, with what is done to them left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy
from transformers.trainer_pt_utils import LabelSmoother

from loss_spellings import Loss, S, V, head_inputs, inputs, with_head
from rewriting import Rewriter, check, each_dtype


def by_nll(logits: Tensor, target: Tensor) -> Tensor:
    return F.nll_loss(F.log_softmax(logits.view(-1, V), -1), target.view(-1))


def by_wide_nll(logits: Tensor, target: Tensor) -> Tensor:
    log_probs = logits[..., :-1, :].log_softmax(-1, dtype=torch.float32)
    return F.nll_loss(log_probs.reshape(-1, V), target[:, 1:].flatten(), reduction="sum") / 7


def by_modules(logits: Tensor, target: Tensor) -> Tensor:
    log_probs = nn.LogSoftmax(dim=1)(logits.float().flatten(0, 1))
    return nn.NLLLoss(reduction="none", ignore_index=3)(log_probs, target.flatten().clamp(min=0))


def by_channels(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.transpose(1, 2), target, label_smoothing=0.1)


def shifted_by_channels(logits: Tensor, target: Tensor) -> Tensor:
    shifted = logits[:, :-1].float()
    return F.cross_entropy(shifted.swapaxes(-1, -2), target[:, 1:], reduction="none").sum(1)


def nll_by_channels(logits: Tensor, target: Tensor) -> Tensor:
    return F.nll_loss(F.log_softmax(logits, -1).transpose(1, 2), target)


REDUCED: dict[str, Loss] = {
    "nll": by_nll,
    "wide-nll": by_wide_nll,
    "modules": by_modules,
    "channels": by_channels,
    "shifted-channels": shifted_by_channels,
    "nll-channels": nll_by_channels,
}


def masked(per_token: Tensor, target: Tensor) -> Tensor:
    mask = target != -100
    return -(per_token * mask).sum() / mask.sum()


def by_gather(logits: Tensor, target: Tensor) -> Tensor:
    labels = target.clamp(min=0).unsqueeze(-1)
    return masked(F.log_softmax(logits, dim=-1).gather(-1, labels).squeeze(-1), target)


def by_shifted_gather(logits: Tensor, target: Tensor) -> Tensor:
    """As TRL computes the log-probabilities of a completion, each of which is wanted."""
    logits, target = logits[:, :-1, :].float() / 0.7, target[:, 1:]
    index = target.clamp(min=0)[..., None]
    per_token = torch.gather(logits.log_softmax(-1), dim=2, index=index).squeeze(2)
    return per_token.masked_fill(target == -100, 0.0)


def by_written_labels(logits: Tensor, target: Tensor) -> Tensor:
    """As DPO's code has it: labels are written, between the head and the loss."""
    labels = target.clone()
    labels[labels == -100] = 0
    per_token = torch.take_along_dim(logits.log_softmax(-1), labels[..., None], dim=-1)
    return masked(per_token[..., 0], target)


def by_gather_of_rows(logits: Tensor, target: Tensor) -> Tensor:
    log_probs = -torch.log_softmax(logits.view(-1, V), 1)
    return log_probs.gather(1, target.clamp(min=0).view(-1, 1)).mean()


def by_logsumexp(logits: Tensor, target: Tensor) -> Tensor:
    chosen = logits.gather(-1, target.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return masked(chosen - torch.logsumexp(logits, dim=-1), target)


def by_wide_logsumexp(logits: Tensor, target: Tensor) -> Tensor:
    """With a z-loss."""
    logits = torch.tanh(logits.float() / 3.0) * 3.0
    lse = logits.logsumexp(-1, keepdim=True)
    per_token = lse - torch.gather(logits, 2, target.clamp(min=0)[:, :, None])
    return per_token.sum() + 1e-2 * lse.square().sum()


def smoothed(logits: Tensor, target: Tensor) -> Tensor:
    return LabelSmoother(epsilon=0.2)({"logits": logits}, target)


def shifted_and_smoothed(logits: Tensor, target: Tensor) -> Tensor:
    items = torch.tensor(7)
    return LabelSmoother()((logits,), target, shift_labels=True, num_items_in_batch=items)


PER_TOKEN: dict[str, Loss] = {
    "gather": by_gather,
    "trl": by_shifted_gather,
    "dpo": by_written_labels,
    "rows": by_gather_of_rows,
    "logsumexp": by_logsumexp,
    "wide-logsumexp": by_wide_logsumexp,
    "smoothed": smoothed,
    "shifted-and-smoothed": shifted_and_smoothed,
}
LOSSES = {**REDUCED, **PER_TOKEN}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize(
    ("head", "dtype"),
    ((False, torch.bfloat16), (True, torch.float32), (True, torch.bfloat16)),
    ids=("logits-bfloat16", "head-float32", "head-bfloat16"),
)
def test_losses_of_log_probabilities(head, loss, dtype):
    op = "linear_cross_entropy" if head else "cross_entropy"
    function, arguments = (with_head(loss), head_inputs) if head else (loss, inputs)
    found = check(function, *arguments(dtype), counts={op: 1})
    # Nothing of the size of the logits is left.
    made = [node.meta.get("example_value") for node in found.nodes() if node.op != "placeholder"]
    wide = [one for one in made if isinstance(one, Tensor) and V in one.shape]
    assert not (wide if head else [one for one in wide if one.dtype != dtype])


def test_losses_of_tokens_of_any_length():
    for loss in (by_gather, shifted_and_smoothed, by_wide_logsumexp):
        model = with_head_of(loss)
        arguments = [(x, target) for x, _, target in (head_inputs(), head_inputs(rows=3, length=7))]
        first, then = arguments
        check(model, *first, then=then, counts={"linear_cross_entropy": 1}, dynamic=True)


def with_head_of(loss: Loss) -> nn.Module:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.head = nn.Linear(8, V, bias=False)

        def forward(self, x: Tensor, target: Tensor) -> Any:
            return loss(self.head(x), target)

    return Model()


@pytest.mark.parametrize("loss", [by_gather, smoothed, by_wide_logsumexp])
def test_losses_of_tokens_under_autocast(loss):
    def function(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return loss(F.linear(x, weight), target)

    found = check(function, *head_inputs(), counts={"linear_cross_entropy": 1})
    # As autocast would have cast them for the head.
    (read,) = [node for node in found.nodes() if "cross_entropy" in str(node.target)]
    if read.target is torch.ops.liger.linear_cross_entropy_forward.default:
        assert [one.meta["example_value"].dtype for one in read.args[:2]] == [torch.bfloat16] * 2


def test_what_is_matched_is_erased_and_nothing_else():
    def function(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        unused = x.sin()
        loss = smoothed(x @ weight.t(), target)
        unused.add_(1)
        return loss

    found = check(function, *head_inputs(), counts={"linear_cross_entropy": 1})
    (graph,) = found.graphs
    names = [str(getattr(node.target, "__name__", node.target)) for node in graph.graph.nodes]
    assert {"sin", "add_", "masked_fill_"} <= set(names)
    assert not {"t", "matmul", "log_softmax", "gather"} & set(names)


def test_what_is_refused_leaves_the_graph_as_it_came():
    """Even where nodes were already put in."""
    found = check(with_head(summed_in_float64), *head_inputs(), counts={})
    untouched = Rewriter(["rope"])
    torch._dynamo.reset()
    torch.compile(with_head(summed_in_float64), backend=untouched)(*head_inputs())
    code = [str(one.graphs[0].graph) for one in (found, untouched)]
    assert code[0] == code[1]


def test_parts_of_losses_are_saved_and_not_computed_again():
    found = check(with_head(smoothed), *head_inputs(), counts={"linear_cross_entropy": 1})
    (node,) = [node for node in found.nodes() if "recompute" in node.meta]
    assert node.target is torch.ops.liger.linear_cross_entropy_forward.default
    assert node.meta["recompute"] is CheckpointPolicy.MUST_SAVE


def test_ignored_targets_of_gather_are_out_of_range():
    """What gather would not take is not taken for the op's ignore_index."""
    x, weight, target = head_inputs()
    unmasked = lambda logits, target: logits.log_softmax(-1).gather(-1, target.unsqueeze(-1))
    function = with_head(unmasked)
    compiled = torch.compile(function, backend="liger", options={"inner_backend": "eager"})
    torch.testing.assert_close(
        compiled(x, weight, target.clamp(min=0)), function(x, weight, target.clamp(min=0))
    )
    with pytest.raises(IndexError):
        compiled(x, weight, target)


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


def entropy_too(logits: Tensor, target: Tensor) -> Tensor:
    log_probs = F.log_softmax(logits, -1)
    chosen = log_probs.gather(-1, target.clamp(min=0).unsqueeze(-1))
    return chosen.mean() - (log_probs.exp() * log_probs).sum(-1).mean()


def of_two_targets(logits: Tensor, target: Tensor) -> Tensor:
    log_probs, labels = F.log_softmax(logits, -1), target.clamp(min=0).unsqueeze(-1)
    return log_probs.gather(-1, labels).mean() - log_probs.gather(-1, 10 - labels).mean()


def of_the_three_largest(logits: Tensor, target: Tensor) -> Tensor:
    labels = target.clamp(min=0).unsqueeze(-1).expand(-1, -1, 3)
    return F.log_softmax(logits, -1).gather(-1, labels).mean()


def of_some_positions(logits: Tensor, target: Tensor) -> Tensor:
    """gather takes an index of fewer positions than there are."""
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
    """And one of the two is written."""
    chosen = logits.gather(-1, target.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    first, second = logits.logsumexp(-1), logits.logsumexp(-1)
    return (first.detach().zero_() + second - chosen).mean()


NEAR: dict[str, tuple[Loss, str]] = {
    "rounded": (rounded_before_nll, "are cast between"),
    "softmax-then-log": (of_softmax, "not known to be log_softmax"),
    "over-positions": (over_positions, "not known to be log_softmax"),
    "over-rows": (over_rows, "not known to be log_softmax"),
    "returned": (returned, "the log-probabilities are returned"),
    "entropy": (entropy_too, "the log-probabilities are used by exp too"),
    "two-targets": (of_two_targets, "several targets"),
    "three-largest": (of_the_three_largest, "not one for each position"),
    "some-positions": (of_some_positions, "not one for each position"),
    "rounded-before-gather": (rounded_before_gather, "are cast between"),
    "float64": (summed_in_float64, "are summed in torch.float64"),
    "summed-over-positions": (summed_over_positions, "are used by sum_1 too"),
    "computed-twice": (computed_twice, "computed twice"),
    "used-before": (used_before_its_targets, "before its targets are known"),
}


@pytest.mark.parametrize(("loss", "reason"), NEAR.values(), ids=NEAR)
def test_losses_that_come_close(loss, reason):
    found = check(with_head(loss), *head_inputs(), counts={})
    for op in ("cross_entropy", "linear_cross_entropy"):
        assert found.reasons(op) and all(reason in one for one in found.reasons(op))


def written_between(logits: Tensor, target: Tensor) -> Tensor:
    log_probs, labels = F.log_softmax(logits, -1), target.clamp(min=0).unsqueeze(-1)
    chosen = log_probs.gather(-1, labels)
    labels.zero_()
    return chosen.mean() + log_probs.sum(-1).mean()


def test_labels_that_are_written_between_the_parts():
    x, weight, target = head_inputs()
    found = check(with_head(written_between), x.detach(), weight.detach(), target, counts={})
    assert "written in place" in found.reasons("linear_cross_entropy")[0]


def picked(logits: Tensor, target: Tensor) -> Tensor:
    """One logit of each token is no loss; nor is logsumexp alone."""
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


ADDED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "bart": lambda logits, bias: logits + bias.view(1, V),
    "commuted": lambda logits, bias: bias + logits,
    "then-scaled": lambda logits, bias: (logits + bias) * 0.5,
}


@each_dtype
@pytest.mark.parametrize("add", ADDED.values(), ids=ADDED)
def test_a_bias_that_is_added_to_the_logits(add, dtype):
    def function(x: Tensor, weight: Tensor, bias: Tensor, target: Tensor) -> Tensor:
        return nn.CrossEntropyLoss()(add(F.linear(x, weight), bias).view(-1, V), target.view(-1))

    x, weight, target = head_inputs(dtype)
    bias = torch.linspace(-1, 1, V).to(dtype).requires_grad_()
    found = check(function, x, weight, bias, target, counts={"linear_cross_entropy": 1})
    assert found.calls("linear_cross_entropy")[0]["bias"] is not None
    own = lambda x, weight, bias, target: (
        function(x, weight, bias, target)
        + F.cross_entropy(add(F.linear(x, weight, bias), bias).view(-1, V), target.view(-1))
    )
    check(own, x, weight, bias, target, counts={"linear_cross_entropy": 2})


@pytest.mark.parametrize(
    ("other", "reason"),
    (
        (lambda logits: torch.ones(V, dtype=torch.bfloat16), "bfloat16"),
        (lambda logits: logits.detach().sin(), "not one number a class"),
        (lambda logits: torch.ones(S, 1), "not one number a class"),
    ),
    ids=("dtype", "residual", "position"),
)
def test_what_is_added_and_is_no_bias(other, reason):
    def function(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        logits = F.linear(x, weight)
        return by_nll(logits + other(logits), target)

    found = check(function, *head_inputs(), counts={"cross_entropy": 1})
    assert reason in found.reasons("linear_cross_entropy")[0]
