"""Each loss of pairs against its paper's formula, written out pair by pair in Python's floats."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from liger_ops.losses import dpo_loss, sequence_log_prob
from loss_batches import SMOOTHING, LossBatch, full_batch, loss_batches, mean, sigma, smoothed

BETA, TAU, SHIFT = 0.7, 0.4, 0.3


def exo(z: float) -> float:
    chosen = sigma(z) * math.log(sigma(z) / (1 - SMOOTHING))
    return chosen + sigma(-z) * math.log(sigma(-z) / SMOOTHING)


def robust(z: float) -> float:
    clean, flipped = -math.log(sigma(z)), -math.log(sigma(-z))
    return ((1 - SMOOTHING) * clean - SMOOTHING * flipped) / (1 - 2 * SMOOTHING)


def discopop(z: float) -> float:
    share = sigma(z / TAU)
    return (1 - share) * math.log(1 + math.exp(-z)) + share * math.exp(-z)


# The loss of a pair, from w and l, the log-ratios of chosen and rejected response, and their means
# over tokens. The papers are named in docs/losses.md.
FORMULAS = {
    "sigmoid": lambda w, l, mean_w, mean_l: smoothed(BETA * (w - l)),
    "hinge": lambda w, l, mean_w, mean_l: max(0.0, 1 - BETA * (w - l)),
    "ipo": lambda w, l, mean_w, mean_l: (mean_w - mean_l - 1 / (2 * BETA)) ** 2,
    "exo_pair": lambda w, l, mean_w, mean_l: exo(BETA * (w - l)),
    "nca_pair": lambda w, l, mean_w, mean_l: (
        -math.log(sigma(BETA * w)) - math.log(sigma(-BETA * w)) / 2 - math.log(sigma(-BETA * l)) / 2
    ),
    "robust": lambda w, l, mean_w, mean_l: robust(BETA * (w - l)),
    "bco_pair": lambda w, l, mean_w, mean_l: (
        -math.log(sigma(BETA * w - SHIFT)) - math.log(sigma(-(BETA * l - SHIFT)))
    ),
    "sppo_hard": lambda w, l, mean_w, mean_l: (
        (w - (1 - 0.5) / BETA) ** 2 + (l - (0 - 0.5) / BETA) ** 2
    ),
    "apo_zero": lambda w, l, mean_w, mean_l: 1 - sigma(BETA * w) + sigma(BETA * l),
    "apo_down": lambda w, l, mean_w, mean_l: sigma(BETA * w) + 1 - sigma(BETA * (w - l)),
    "discopop": lambda w, l, mean_w, mean_l: discopop(BETA * (w - l)),
    "sigmoid_norm": lambda w, l, mean_w, mean_l: smoothed(BETA * (mean_w - mean_l)),
}
SORTED = ("aot", "aot_unpaired")
LOSS_TYPES = [*FORMULAS, *SORTED, "sft"]


def options_of(loss_type: str) -> dict[str, Any]:
    smoothing = loss_type in ("sigmoid", "exo_pair", "robust", "sigmoid_norm", *SORTED)
    return {
        "beta": BETA,
        "loss_type": loss_type,
        "discopop_tau": TAU,
        "label_smoothing": SMOOTHING if smoothing else 0.0,
        "reward_shift": SHIFT if loss_type == "bco_pair" else None,
    }


def expected(loss_type: str, batch: LossBatch, policy: Any, ref: Any) -> float:
    """The mean of the formula over the pairs; empty ones have no loss."""
    policy, ref = batch.kept(policy), batch.kept(ref)
    n = len(policy) // 2
    ratios = [[a - b for a, b in zip(x, y, strict=True)] for x, y in zip(policy, ref, strict=True)]
    pairs = [i for i in range(n) if ratios[i] or ratios[n + i]]
    if loss_type == "sft":
        tokens = [x for row in policy[:n] for x in row]
        return -mean(tokens)
    if loss_type == "aot":
        high = sorted(sum(policy[i]) - sum(policy[n + i]) for i in pairs)
        low = sorted(sum(ref[i]) - sum(ref[n + i]) for i in pairs)
    elif loss_type == "aot_unpaired":
        high = sorted(sum(ratios[i]) for i in pairs)
        low = sorted(sum(ratios[n + i]) for i in pairs)
    else:
        formula = FORMULAS[loss_type]
        each = [
            formula(sum(w), sum(l), mean(w), mean(l))
            for w, l in ((ratios[i], ratios[n + i]) for i in pairs)
        ]
        return sum(each) / n
    return sum(smoothed(BETA * (a - b)) for a, b in zip(high, low, strict=True)) / n


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@settings(max_examples=settings().max_examples // 2)
@given(batch=loss_batches(pairs=True))
def test_formula(loss_type, batch):
    policy, ref = batch.values(0), batch.values(1)
    log_prob = policy.clone().requires_grad_()
    output = dpo_loss(log_prob, batch.mask, ref, **options_of(loss_type))
    assert output.loss.dtype is torch.float64
    torch.testing.assert_close(
        output.loss.item(), expected(loss_type, batch, policy, ref), rtol=1e-12, atol=1e-12
    )
    (gradient,) = torch.autograd.grad(output.loss, log_prob)
    assert gradient.isfinite().all() and not gradient[~batch.mask].any()
    narrow = dpo_loss(policy.float(), batch.mask.int(), ref.float(), **options_of(loss_type)).loss
    assert narrow.dtype is torch.float32
    torch.testing.assert_close(narrow.double(), output.loss.detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_gradient(loss_type):
    batch = full_batch(4, 3)
    ref = batch.values(1).nan_to_num()
    policy = batch.values(0).nan_to_num().requires_grad_()
    options = options_of(loss_type)
    assert torch.autograd.gradcheck(lambda x: dpo_loss(x, batch.mask, ref, **options).loss, policy)


def test_losses_are_weighed_and_summed():
    batch = full_batch(6, 5)
    policy, ref = batch.values(0), batch.values(1)
    types = ["sigmoid", "bco_pair", "sft"]
    total = dpo_loss(policy, batch.mask, ref, loss_type=types, loss_weights=[0.8, 0.2, 1.5]).loss
    each = [dpo_loss(policy, batch.mask, ref, loss_type=name).loss for name in types]
    torch.testing.assert_close(total, 0.8 * each[0] + 0.2 * each[1] + 1.5 * each[2])
    unweighted = dpo_loss(policy, batch.mask, ref, loss_type=types).loss
    torch.testing.assert_close(unweighted, sum(each))


def test_pairs_are_weighed():
    batch = full_batch(6, 5)
    policy, ref = batch.values(0), batch.values(1)
    alone = [
        dpo_loss(policy[i::3], batch.mask[i::3], ref[i::3], loss_type="hinge").loss
        for i in range(3)
    ]
    weight = torch.tensor([0.5, 2.0, 0.0], requires_grad=True)
    total = dpo_loss(policy, batch.mask, ref, loss_type="hinge", pair_weight=weight).loss
    torch.testing.assert_close(total, (0.5 * alone[0] + 2 * alone[1]) / 3)
    assert not total.requires_grad


# f'(u), up to a constant that has no effect, as in table 1 of f-DPO, arXiv:2309.16240.
DERIVATIVES = {
    "reverse_kl": lambda u, alpha: math.log(u) + 1,
    "forward_kl": lambda u, alpha: -1 / u,
    "js_divergence": lambda u, alpha: math.log(2 * u / (1 + u)),
    "alpha_divergence": lambda u, alpha: (1 - u**-alpha) / alpha,
}


@pytest.mark.parametrize("divergence", DERIVATIVES)
@given(alpha=st.sampled_from([0.3, 0.5, 0.8, 1.0]), seed=st.integers(0, 50))
@settings(max_examples=settings().max_examples // 6)
def test_f_divergence(divergence, alpha, seed):
    batch = full_batch(2, 4, seed)
    policy, ref = batch.values(0), batch.values(1)
    w, l = (sum(x) - sum(y) for x, y in zip(batch.kept(policy), batch.kept(ref), strict=True))
    derivative = DERIVATIVES[divergence]
    z = 0.1 * (derivative(math.exp(w), alpha) - derivative(math.exp(l), alpha))
    options = {"f_divergence_type": divergence, "f_alpha_divergence_coef": alpha}
    loss = dpo_loss(policy, batch.mask, ref, **options).loss.item()
    assert loss == pytest.approx(-math.log(sigma(z)), rel=1e-12)


def test_alpha_divergence_has_its_limits():
    batch = full_batch(4, 5)
    values = (batch.values(0), batch.mask, batch.values(1))

    def loss(kind, alpha=0.0):
        return dpo_loss(*values, f_divergence_type=kind, f_alpha_divergence_coef=alpha).loss

    torch.testing.assert_close(loss("alpha_divergence"), loss("reverse_kl"))
    torch.testing.assert_close(loss("alpha_divergence", 1e-9), loss("reverse_kl"))
    torch.testing.assert_close(loss("alpha_divergence", 1.0), loss("forward_kl"))


@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("ld_alpha", [None, 0.0, 0.3])
def test_a_reference_may_come_as_sums(average, ld_alpha):
    batch = full_batch(4, 5)
    policy, ref = batch.values(0), batch.values(1)
    options = {"average_log_prob": average, "ld_alpha": ld_alpha}
    sums = sequence_log_prob(ref, batch.mask, **options)
    of_tokens = dpo_loss(policy, batch.mask, ref, **options)
    of_sums = dpo_loss(policy, batch.mask, sums, **options)
    for a, b in zip(of_tokens, of_sums, strict=True):
        torch.testing.assert_close(a, b)
    chosen, rejected = batch.kept(policy)[:2], batch.kept(policy)[2:]
    for i, (w, l) in enumerate(zip(chosen, rejected, strict=True)):
        shared, weight = min(len(w), len(l)), 1.0 if ld_alpha is None else ld_alpha
        total = sum(x if t < shared else weight * x for t, x in enumerate(w))
        wanted = total / len(w) if average else total
        assert of_tokens.chosen_log_prob[i].item() == pytest.approx(wanted)


def test_without_a_reference_and_its_outputs():
    batch = full_batch(4, 5)
    policy = batch.values(0).requires_grad_()
    zeros = torch.zeros_like(policy)
    alone = dpo_loss(policy, batch.mask, beta=0.3)
    for a, b in zip(alone, dpo_loss(policy, batch.mask, zeros, beta=0.3), strict=True):
        torch.testing.assert_close(a, b)
    sums = torch.tensor([sum(row) for row in batch.kept(policy.detach())], dtype=torch.float64)
    torch.testing.assert_close(alone.chosen_log_prob, sums[:2])
    torch.testing.assert_close(alone.rejected_rewards, 0.3 * sums[2:])
    assert alone.log_odds is None
    assert [field.requires_grad for field in alone[:-1]] == [True, *[False] * 5]


def test_averages_leave_the_losses_per_token_as_they_are():
    batch = full_batch(4, 5)
    values = (batch.values(0), batch.mask, batch.values(1))
    for name in ("ipo", "sigmoid_norm"):
        a, b = (dpo_loss(*values, loss_type=name, average_log_prob=x).loss for x in (False, True))
        torch.testing.assert_close(a, b)
    norm = dpo_loss(*values, loss_type="sigmoid_norm").loss
    torch.testing.assert_close(dpo_loss(*values, average_log_prob=True).loss, norm)


@pytest.mark.parametrize("kind", ["forward_kl", "alpha_divergence"])
@pytest.mark.parametrize("loss_type", ["sigmoid", "exo_pair", "discopop"])
def test_far_from_the_reference_nothing_is_nan(kind, loss_type):
    """exp of a log-ratio of 1e4 overflows; the gradient is then 0 or finite, not NaN."""
    log_prob = torch.tensor([[-1e4], [-1.0]], requires_grad=True)
    ref = torch.tensor([[-1.0], [-1e4]])
    smoothing = 0.1 if loss_type == "exo_pair" else 0.0
    options = {"loss_type": loss_type, "label_smoothing": smoothing}
    for reference in (ref, ref.flip(0)):
        for divergence in ("reverse_kl", kind):
            loss = dpo_loss(
                log_prob, torch.ones(2, 1), reference, f_divergence_type=divergence, **options
            ).loss
            (gradient,) = torch.autograd.grad(loss, log_prob)
            assert not loss.isnan() and not gradient.isnan().any()
