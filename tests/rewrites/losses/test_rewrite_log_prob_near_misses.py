"""Near misses of log-probabilities and entropies: not rewritten, or only in part."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.trainer_pt_utils import LabelSmoother

import liger_ops
from loss_spellings import V, head_inputs, with_head
from rewriting import check
from token_spellings import (
    Spelling,
    by_log_probs,
    by_logsumexp,
    selective_log_softmax,
    shared_log_probs,
    trl_both,
)


def head(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    x, weight, labels = head_inputs(dtype)
    return [x, weight, labels.clamp(min=0)]


def of_other_positions(logits: Tensor, labels: Tensor) -> Tensor:
    return -(logits[:, 1:].softmax(-1) * logits[:, :-1].log_softmax(-1)).sum(-1)


def less_another_lse(logits: Tensor, labels: Tensor) -> Tensor:
    return logits.mul(2).logsumexp(-1) - (logits.softmax(-1) * logits).sum(-1)


def of_a_scaled_mean(logits: Tensor, labels: Tensor) -> Tensor:
    return logits.logsumexp(-1) - (logits.softmax(-1) * (logits * 2)).sum(-1)


def exp_of_negative(logits: Tensor, labels: Tensor) -> Tensor:
    log_probs = logits.log_softmax(-1)
    return ((-log_probs).exp() * log_probs).sum(-1)


def of_two_probabilities(logits: Tensor, labels: Tensor) -> Tensor:
    p = logits.softmax(-1)
    return (p * p.sqrt()).sum(-1) + (p * logits.softmax(-1)).sum(-1)


UNLIKE: dict[str, Spelling] = {
    "over-positions": lambda logits, labels: -(logits.softmax(1) * logits.log_softmax(1)).sum(-1),
    "summed-over-positions": lambda logits, labels: (
        -(logits.softmax(-1) * logits.log_softmax(-1)).sum(1)
    ),
    "other-logits": lambda logits, labels: (
        -(logits.flip(0).softmax(-1) * logits.log_softmax(-1)).sum(-1)
    ),
    "other-temperatures": lambda logits, labels: (
        -((logits / 2.0).softmax(-1) * logits.log_softmax(-1)).sum(-1)
    ),
    "other-positions": of_other_positions,
    "another-lse": less_another_lse,
    "scaled-mean": of_a_scaled_mean,
    "exp-of-negative": exp_of_negative,
    "two-probabilities": of_two_probabilities,
    "broadcast": lambda logits, labels: -(logits[:1].softmax(-1) * logits.log_softmax(-1)).sum(-1),
}


@pytest.mark.parametrize("spelling", UNLIKE.values(), ids=UNLIKE)
def test_what_is_no_entropy(spelling):
    check(with_head(spelling), *head(), counts={})


def rounded(logits: Tensor, labels: Tensor) -> Tensor:
    log_probs = logits.log_softmax(-1)
    return -(log_probs.exp().bfloat16() * log_probs).sum(-1)


def in_float64(logits: Tensor, labels: Tensor) -> Tensor:
    log_probs = logits.log_softmax(-1)
    return -(log_probs.exp() * log_probs).sum(-1, dtype=torch.float64)


def probabilities_too(logits: Tensor, labels: Tensor) -> Any:
    p = logits.softmax(-1)
    return logits.logsumexp(-1) - (p * logits).sum(-1), p.amax(-1)


def two_entropies(logits: Tensor, labels: Tensor) -> Any:
    log_probs = logits.log_softmax(-1)
    p = log_probs.exp()
    return -(p * log_probs).sum(-1), -(p.square().sqrt() * log_probs).sum(-1)


REFUSED: dict[str, tuple[Spelling, str]] = {
    "rounded": (rounded, "are cast between"),
    "float64": (in_float64, "summed in torch.float64"),
    "probabilities": (probabilities_too, "the probabilities are used by amax too"),
    "two-entropies": (two_entropies, "are used by"),
}


@pytest.mark.parametrize(("spelling", "reason"), REFUSED.values(), ids=REFUSED)
def test_entropies_that_are_refused(spelling, reason):
    found = check(with_head(spelling), *head(), counts={})
    for op in ("log_prob", "linear_log_prob"):
        assert found.reasons(op) and reason in found.reasons(op)[0]


def and_prediction(logits: Tensor, labels: Tensor) -> Any:
    return *trl_both(logits, labels), logits.argmax(-1)


def and_logits(logits: Tensor, labels: Tensor) -> Any:
    return *shared_log_probs(logits, labels), logits


@pytest.mark.parametrize(
    ("spelling", "reason"),
    [(and_prediction, "used by argmax too"), (and_logits, "the logits are returned")],
)
def test_logits_that_are_needed(spelling, reason):
    """One call of the op of logits takes both, and the head stays."""
    found = check(with_head(spelling), *head(), counts={"log_prob": 1})
    (given,) = found.reasons("linear_log_prob")
    assert reason in given


def test_two_temperatures():
    """The log-probability and the entropy are of two distributions of the same logits."""

    def spelling(logits: Tensor, labels: Tensor) -> Any:
        return selective_log_softmax(logits, labels, temperature=0.7), by_logsumexp(logits)

    found = check(with_head(spelling), *head(), counts={"log_prob": 2})
    assert len(found.calls("log_prob_forward")) == 2
    assert [one["logit_scale"] for one in found.calls("log_prob_forward")] == [1 / 0.7, 1.0]


def test_an_entropy_with_several_targets():
    """The log-probabilities of two targets stay, and the entropy has its own softmax."""

    def spelling(logits: Tensor, labels: Tensor) -> Any:
        two = torch.stack([labels, 10 - labels], -1)
        return logits.log_softmax(-1).gather(-1, two), by_log_probs(logits)

    check(with_head(spelling), *head(), counts={"log_prob": 1})


def in_another_order(logits: Tensor, labels: Tensor) -> Tensor:
    return torch.stack([by_logsumexp(row) for row in (logits[1], logits[0])])


def of_some_rows(logits: Tensor, labels: Tensor) -> Tensor:
    first, _, third = logits.flatten(0, 1).split(4)
    return torch.cat([by_logsumexp(first), by_logsumexp(third)])


def along_another_dimension(logits: Tensor, labels: Tensor) -> Tensor:
    return torch.stack([by_logsumexp(row) for row in logits.unbind(0)], dim=1)


def of_unlike_rows(logits: Tensor, labels: Tensor) -> Tensor:
    first, second = logits.unbind(0)
    return torch.stack([by_logsumexp(first), by_logsumexp(second / 2.0)])


@pytest.mark.parametrize(
    "spelling", [in_another_order, of_some_rows, along_another_dimension, of_unlike_rows]
)
def test_loops_that_are_not_of_all_rows(spelling):
    """Each row is an op of its own."""
    check(with_head(spelling), *head(), counts={"log_prob": 2})


def test_a_loop_that_writes_its_results():
    """As verl's entropy_from_logits_with_chunking does."""

    def spelling(logits: Tensor, labels: Tensor) -> Tensor:
        rows = logits.flatten(0, 1)
        entropy = torch.zeros(rows.shape[0])
        for i in range(0, rows.shape[0], 6):
            entropy[i : i + 6] = by_logsumexp(rows[i : i + 6].float())
        return entropy

    check(with_head(spelling), *head(), counts={"log_prob": 2})


def test_label_smoothing_and_an_entropy():
    """Two calls of ops of logits: neither returns both."""

    def spelling(logits: Tensor, labels: Tensor) -> Any:
        return LabelSmoother()((logits,), labels), by_logsumexp(logits)

    found = check(with_head(spelling), *head(), counts={"cross_entropy": 1, "log_prob": 1})
    assert "used by" in found.reasons("linear_cross_entropy")[0]


def test_targets_of_other_rows():
    """Each row's targets are its own, whatever tensor they come from."""

    def spelling(logits: Tensor, labels: Tensor) -> Tensor:
        rows = zip(logits, labels.flip(0), strict=True)
        of = [x.log_softmax(-1).gather(-1, y.unsqueeze(-1)) for x, y in rows]
        return torch.stack(of)

    check(with_head(spelling), *head(), counts={"linear_log_prob": 1})


def test_labels_out_of_range():
    """gather rejects them, negative ones too, and so does the op."""
    x, weight, labels = head()
    for wrong in (V, -1, -100):
        function = torch.compile(with_head(shared_log_probs), backend="eager")
        compiled = torch.compile(
            with_head(shared_log_probs),
            backend=liger_ops.backend,
            options={"inner_backend": "eager"},
        )
        labels[0, 0] = wrong
        with pytest.raises((IndexError, RuntimeError)):
            function(x, weight, labels)
        with pytest.raises(IndexError):
            compiled(x, weight, labels)


def scaled_in_place(logits: Tensor, labels: Tensor) -> Any:
    """verl's and OpenRLHF's way to the temperature. The op reads what was written."""
    logits.div_(0.7)
    return shared_log_probs(logits, labels)


def written_between(logits: Tensor, labels: Tensor) -> Any:
    logits = logits * 1.0
    log_probs = logits.log_softmax(-1)
    logits.zero_()
    return -(log_probs.exp() * log_probs).sum(-1), logits


def written_labels(logits: Tensor, labels: Tensor) -> Any:
    index = labels.unsqueeze(-1).clone()
    log_probs = logits.log_softmax(-1)
    chosen = log_probs.gather(-1, index)
    index.zero_()
    return chosen, -(log_probs.exp() * log_probs).sum(-1), index


@pytest.mark.parametrize(
    ("spelling", "counts", "reason"),
    [
        (scaled_in_place, {"log_prob": 1}, "used by div_ too"),
        (written_between, {}, "used by zero_ too"),
        (written_labels, {}, "written in place"),
    ],
)
def test_writes_in_place(spelling, counts, reason):
    arguments = [one.detach() for one in head()]
    found = check(with_head(spelling), *arguments, counts=counts)
    assert reason in found.reasons("linear_log_prob")[0]


def test_results_that_are_written_in_place():
    """As TRL's DPO does with ignored tokens; the backward reads the op's own results."""

    def spelling(logits: Tensor, labels: Tensor) -> Any:
        log_prob, entropy = shared_log_probs(logits, labels)
        log_prob[labels == 0] = 0
        entropy.masked_fill_(labels == 0, 0.0)
        return log_prob, entropy

    check(with_head(spelling), *head(), counts={"linear_log_prob": 1})


def test_an_entropy_that_blocks_the_gradient():
    """The log-probabilities are computed without gradients, and gathered with them."""

    def spelling(logits: Tensor, labels: Tensor) -> Tensor:
        with torch.no_grad():
            log_probs = logits.log_softmax(-1)
        return log_probs.gather(-1, labels.unsqueeze(-1)) * logits.mean()

    found = check(with_head(spelling), *head(), counts={})
    assert "gradient or autocast modes" in found.reasons("log_prob")[0]


def test_logits_of_minus_infinity():
    """The code gives NaN for a class of -inf; the op gives the entropy of the others."""

    def spelling(logits: Tensor, labels: Tensor) -> Any:
        return shared_log_probs(logits.index_fill(-1, torch.tensor([10]), -torch.inf), labels)

    x, weight, labels = head()
    compiled = torch.compile(
        with_head(spelling), backend=liger_ops.backend, options={"inner_backend": "eager"}
    )
    log_prob, entropy = compiled(x, weight, labels % 10)
    expected, nan = with_head(spelling)(x, weight, labels % 10)
    assert nan.isnan().all()
    torch.testing.assert_close(log_prob, expected)
    kept = F.linear(x, weight)[..., :10]
    torch.testing.assert_close(entropy, by_logsumexp(kept))
