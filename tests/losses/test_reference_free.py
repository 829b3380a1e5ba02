"""ORPO, CPO and SimPO against their papers' formulas, pair by pair in Python's floats."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings

from liger_ops.losses import cpo_loss, orpo_loss, simpo_loss
from loss_batches import SMOOTHING, full_batch, loss_batches, mean, sigma, smoothed

BETA, GAMMA, ALPHA = 0.7, 0.4, 0.6


def odds(row):
    p = math.exp(mean(row))
    return p / (1 - p)


FORMULAS = {
    "orpo": lambda w, l: -BETA * math.log(sigma(math.log(odds(w) / odds(l)))) if w and l else 0.0,
    "sigmoid": lambda w, l: smoothed(BETA * (sum(w) - sum(l))),
    "hinge": lambda w, l: max(0.0, 1 - BETA * (sum(w) - sum(l))),
    "ipo": lambda w, l: (mean(w) - mean(l) - 1 / (2 * BETA)) ** 2,
    "simpo": lambda w, l: smoothed(BETA * (mean(w) - mean(l)) - GAMMA),
}


def call(name, log_prob, mask):
    if name == "orpo":
        return orpo_loss(log_prob, mask, beta=BETA, alpha=ALPHA)
    smoothing = {"label_smoothing": SMOOTHING} if name in ("sigmoid", "simpo") else {}
    if name == "simpo":
        return simpo_loss(log_prob, mask, beta=BETA, gamma=GAMMA, alpha=ALPHA, **smoothing)
    return cpo_loss(log_prob, mask, beta=BETA, alpha=ALPHA, loss_type=name, **smoothing)


def expected(name, batch, policy):
    rows = batch.kept(policy)
    n = len(rows) // 2
    pairs = [(w, l) for w, l in zip(rows[:n], rows[n:], strict=True) if w or l]
    nll = -mean([x for row in rows[:n] for x in row])
    return sum(FORMULAS[name](w, l) for w, l in pairs) / n + ALPHA * nll


@pytest.mark.parametrize("name", FORMULAS)
@settings(max_examples=settings().max_examples // 2)
@given(batch=loss_batches(pairs=True))
def test_formula(name, batch):
    policy = batch.values(0)
    log_prob = policy.clone().requires_grad_()
    loss = call(name, log_prob, batch.mask).loss
    assert loss.dtype is torch.float64
    torch.testing.assert_close(loss.item(), expected(name, batch, policy), rtol=1e-12, atol=1e-12)
    (gradient,) = torch.autograd.grad(loss, log_prob)
    assert gradient.isfinite().all() and not gradient[~batch.mask].any()
    narrow = call(name, policy.float(), batch.mask.float()).loss
    assert narrow.dtype is torch.float32
    torch.testing.assert_close(narrow.double(), loss.detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", FORMULAS)
def test_gradient(name):
    batch = full_batch(4, 3)
    policy = batch.values(0).nan_to_num().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: call(name, x, batch.mask).loss, policy)


def test_the_chosen_tokens_loss_has_a_mask_of_its_own():
    batch = full_batch(4, 5)
    policy = batch.values(0).nan_to_num(nan=-3.0)
    everything = torch.ones_like(batch.mask)
    for loss in (orpo_loss, cpo_loss, simpo_loss):
        without = loss(policy, batch.mask, alpha=0.0)
        whole = loss(policy, batch.mask, alpha=2.0, nll_mask=everything)
        torch.testing.assert_close(whole.nll_loss, -policy[:2].mean())
        torch.testing.assert_close(whole.loss, without.loss - 2 * policy[:2].mean())


def test_the_chosen_tokens_loss_has_log_probabilities_of_its_own():
    batch = full_batch(4, 5)
    policy, other = (batch.values(i).nan_to_num(nan=-3.0).requires_grad_() for i in (0, 1))
    everything = torch.ones_like(batch.mask)
    for loss in (orpo_loss, cpo_loss, simpo_loss):
        without = loss(policy, batch.mask, alpha=0.0)
        whole = loss(policy, batch.mask, alpha=2.0, nll_mask=everything, nll_log_prob=other)
        torch.testing.assert_close(whole.nll_loss, -other[:2].mean())
        torch.testing.assert_close(whole.loss, without.loss - 2 * other[:2].mean())
        for a, b in zip(whole[1:5], without[1:5], strict=True):
            torch.testing.assert_close(a, b)
        gradients = torch.autograd.grad(whole.loss, (policy, other))
        torch.testing.assert_close(gradients[0], *torch.autograd.grad(without.loss, policy))
        torch.testing.assert_close(gradients[1][:2], torch.full((2, 5), -0.2).double())
        assert not gradients[1][2:].any()


def test_log_odds():
    batch = full_batch(6, 5)
    mask = batch.mask.clone()
    mask[4] = False
    policy = batch.values(0).requires_grad_()
    output = orpo_loss(policy, mask, beta=BETA, alpha=0.0)
    rows = [p[m].tolist() for p, m in zip(policy, mask, strict=True)]
    wanted = [math.log(odds(rows[i]) / odds(rows[i + 3])) if i != 1 else 0.0 for i in range(3)]
    assert output.log_odds.tolist() == pytest.approx(wanted) and not output.log_odds.requires_grad
    losses = torch.nn.functional.logsigmoid(output.log_odds[[0, 2]])
    torch.testing.assert_close(output.loss.detach(), -BETA * losses.sum() / 3)


def test_simpo_has_no_loss_of_tokens_by_default():
    batch = full_batch(4, 5)
    policy = batch.values(0)
    default, without = simpo_loss(policy, batch.mask), simpo_loss(policy, batch.mask, alpha=0.0)
    torch.testing.assert_close(default.loss, without.loss)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("chosen", [0.0, -1e-30, -1e-6, -0.6931, -0.6932, -90.0])
@pytest.mark.parametrize("rejected", [0.0, -1e-6, -50.0])
def test_odds_of_certain_and_impossible_responses(dtype, chosen, rejected):
    """A response of probability 1 has infinite odds; the loss and its gradient are finite."""
    log_prob = torch.tensor([[chosen], [rejected]], dtype=dtype, requires_grad=True)
    loss = orpo_loss(log_prob, torch.ones(2, 1), alpha=0.0).loss
    (gradient,) = torch.autograd.grad(loss, log_prob)
    assert loss.isfinite() and gradient.isfinite().all()
    if chosen and rejected:
        x, y = (v.item() for v in log_prob.detach().double())
        odds = [v - math.log(-math.expm1(v)) for v in (x, y)]
        truth = math.log1p(math.exp(min(odds[1] - odds[0], 700)))
        assert loss.item() == pytest.approx(0.1 * truth, rel=1e-5, abs=1e-30)
