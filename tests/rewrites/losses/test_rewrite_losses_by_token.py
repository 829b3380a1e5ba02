"""Losses of log-probabilities: nll_loss, and per-token losses with the code that follows them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy
from transformers.trainer_pt_utils import LabelSmoother

import liger_ops
from loss_spellings import Loss, V, head_inputs, inputs, with_head
from rewriting import check


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


REDUCED: dict[str, Loss] = {
    "nll": by_nll,
    "wide-nll": by_wide_nll,
    "modules": by_modules,
    "channels": by_channels,
    "shifted-channels": shifted_by_channels,
    "nll-channels": lambda logits, target: F.nll_loss(
        F.log_softmax(logits, -1).transpose(1, 2), target
    ),
}


def masked(per_token: Tensor, target: Tensor) -> Tensor:
    mask = target != -100
    return -(per_token * mask).sum() / mask.sum()


def by_gather(logits: Tensor, target: Tensor) -> Tensor:
    labels = target.clamp(min=0).unsqueeze(-1)
    return masked(F.log_softmax(logits, dim=-1).gather(-1, labels).squeeze(-1), target)


def by_shifted_gather(logits: Tensor, target: Tensor) -> Tensor:
    """TRL's code for the log-probabilities of a completion; each of them is used."""
    logits, target = logits[:, :-1, :].float() / 0.7, target[:, 1:]
    index = target.clamp(min=0)[..., None]
    per_token = torch.gather(logits.log_softmax(-1), dim=2, index=index).squeeze(2)
    return per_token.masked_fill(target == -100, 0.0)


def by_written_labels(logits: Tensor, target: Tensor) -> Tensor:
    """DPO's code writes labels in place between the head and the loss."""
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
    return LabelSmoother()((logits,), target, shift_labels=True)


PER_TOKEN: dict[str, Loss] = {
    "gather": by_gather, "trl": by_shifted_gather, "dpo": by_written_labels,
    "rows": by_gather_of_rows, "logsumexp": by_logsumexp, "wide-logsumexp": by_wide_logsumexp,
}  # fmt: skip


def by_parts(logits: Tensor, target: Tensor) -> Tensor:
    """The logit of the target and logsumexp, each used by itself."""
    chosen = logits.gather(-1, target.clamp(min=0).unsqueeze(-1))
    return logits.logsumexp(-1).square().mean() - chosen.tanh().mean()


SMOOTHED: dict[str, Loss] = {
    "parts": by_parts,
    "smoothed": smoothed,
    "shifted-and-smoothed": shifted_and_smoothed,
}
LOSSES = {
    **{name: (loss, "cross_entropy") for name, loss in (REDUCED | SMOOTHED).items()},
    **{name: (loss, "log_prob") for name, loss in PER_TOKEN.items()},
}


@pytest.mark.parametrize(("loss", "op"), LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize(
    ("head", "dtype"),
    ((False, torch.bfloat16), (True, torch.float32), (True, torch.bfloat16)),
    ids=("logits-bfloat16", "head-float32", "head-bfloat16"),
)
def test_losses_of_log_probabilities(head, loss, op, dtype):
    op = f"linear_{op}" if head else op
    function, arguments = (with_head(loss), head_inputs) if head else (loss, inputs)
    found = check(function, *arguments(dtype), counts={op: 1})
    # No tensor of the size of the logits is in the graph.
    made = [node.meta.get("example_value") for node in found.nodes() if node.op != "placeholder"]
    wide = [one for one in made if isinstance(one, Tensor) and V in one.shape]
    assert not (wide if head else [one for one in wide if one.dtype != dtype])


def test_losses_of_tokens_of_any_length():
    for loss, op in (
        (by_gather, "log_prob"),
        (shifted_and_smoothed, "cross_entropy"),
        (by_wide_logsumexp, "log_prob"),
    ):
        model = with_head_of(loss)
        arguments = [(x, target) for x, _, target in (head_inputs(), head_inputs(rows=3, length=7))]
        first, then = arguments
        check(model, *first, then=then, counts={f"linear_{op}": 1}, dynamic=True)


def with_head_of(loss: Loss) -> nn.Module:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.head = nn.Linear(8, V, bias=False)

        def forward(self, x: Tensor, target: Tensor) -> Any:
            return loss(self.head(x), target)

    return Model()


@pytest.mark.parametrize(
    ("loss", "op"),
    [(by_gather, "log_prob"), (smoothed, "cross_entropy"), (by_wide_logsumexp, "log_prob")],
)
def test_losses_of_tokens_under_autocast(loss, op):
    def function(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return loss(F.linear(x, weight), target)

    found = check(function, *head_inputs(), counts={f"linear_{op}": 1})
    # Autocast would cast them like this for the head.
    (call,) = found.calls(f"linear_{op}_forward")
    assert [call[name].meta["example_value"].dtype for name in ("x", "weight")] == [
        torch.bfloat16,
        torch.bfloat16,
    ]


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


def test_parts_of_losses_are_saved_and_not_computed_again():
    found = check(with_head(smoothed), *head_inputs(), counts={"linear_cross_entropy": 1})
    (node,) = [node for node in found.nodes() if "recompute" in node.meta]
    assert node.target is torch.ops.liger.linear_cross_entropy_forward.default
    assert node.meta["recompute"] is CheckpointPolicy.MUST_SAVE


def test_ignored_targets_of_gather_are_out_of_range():
    """An index that gather rejects is not treated as the op's ignore_index."""
    x, weight, target = head_inputs()
    unmasked = lambda logits, target: logits.log_softmax(-1).gather(-1, target.unsqueeze(-1))
    function = with_head(unmasked)
    compiled = torch.compile(
        function, backend=liger_ops.backend, options={"inner_backend": "eager"}
    )
    torch.testing.assert_close(
        compiled(x, weight, target.clamp(min=0)), function(x, weight, target.clamp(min=0))
    )
    with pytest.raises(IndexError):
        compiled(x, weight, target)
