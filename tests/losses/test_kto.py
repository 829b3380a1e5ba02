"""KTO and the unpaired APO against their papers' formulas, response by response."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from liger_ops.losses import kto_kl, kto_loss
from loss_batches import full_batch, loss_batches, sigma

BETA, GOOD, BAD = 0.7, 1.3, 0.8


def value(loss_type, is_good, r, z0):
    """lambda_y - v(x, y) of KTO, and the terms of APO-zero."""
    if loss_type == "kto":
        v = GOOD * sigma(BETA * (r - z0)) if is_good else BAD * sigma(BETA * (z0 - r))
        return (GOOD if is_good else BAD) - v
    return GOOD * (1 - sigma(BETA * r)) if is_good else BAD * sigma(BETA * r)


def call(loss_type, log_prob, mask, labels, ref, z0):
    return kto_loss(
        log_prob,
        mask,
        labels,
        ref,
        kl=torch.tensor(z0) if loss_type == "kto" else None,
        beta=BETA,
        loss_type=loss_type,
        desirable_weight=GOOD,
        undesirable_weight=BAD,
    )


@pytest.mark.parametrize("loss_type", ["kto", "apo_zero_unpaired"])
@settings(max_examples=settings().max_examples // 2)
@given(batch=loss_batches(), z0=st.sampled_from([0.0, 0.5, 2.0]))
def test_formula(loss_type, batch, z0):
    policy, ref, labels = batch.values(0), batch.values(1), batch.per_row(0) > 0
    log_prob = policy.clone().requires_grad_()
    output = call(loss_type, log_prob, batch.mask, labels, ref, z0)
    total = 0.0
    for row, other, is_good in zip(
        batch.kept(policy), batch.kept(ref), labels.tolist(), strict=True
    ):
        if row:
            total += value(loss_type, is_good, sum(row) - sum(other), z0)
    expected = total / len(labels)
    torch.testing.assert_close(output.loss.item(), expected, rtol=1e-12, atol=1e-12)
    (gradient,) = torch.autograd.grad(output.loss, log_prob)
    assert gradient.isfinite().all() and not gradient[~batch.mask].any()
    narrow = call(loss_type, policy.float(), batch.mask, labels.float(), ref.float(), z0).loss
    assert narrow.dtype is torch.float32
    torch.testing.assert_close(narrow.double(), output.loss.detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("loss_type", ["kto", "apo_zero_unpaired"])
def test_gradient(loss_type):
    batch = full_batch(3, 3)
    policy, ref = (batch.values(i).nan_to_num() for i in range(2))
    labels = torch.tensor([True, False, True])

    def loss(x):
        return call(loss_type, x, batch.mask, labels, ref, 0.5).loss

    assert torch.autograd.gradcheck(loss, policy.requires_grad_())


def test_a_reference_point_for_each_response():
    batch = full_batch(3, 4)
    policy, ref = batch.values(0), batch.values(1)
    labels = torch.tensor([True, False, False])
    points = torch.tensor([0.0, 0.4, 1.0], requires_grad=True)
    output = kto_loss(policy.requires_grad_(), batch.mask, labels, ref, points)
    alone = [
        kto_loss(policy[i : i + 1], batch.mask[i : i + 1], labels[i : i + 1], ref[i : i + 1], point)
        for i, point in enumerate(points)
    ]
    torch.testing.assert_close(output.loss, sum(one.loss for one in alone) / 3)
    torch.testing.assert_close(output.rewards, torch.cat([one.rewards for one in alone]))
    assert torch.autograd.grad(output.loss, points, allow_unused=True) == (None,)


@settings(max_examples=settings().max_examples // 2)
@given(batch=loss_batches())
def test_the_reference_point_is_a_mean_that_is_not_negative(batch):
    policy, ref = batch.values(0).requires_grad_(), batch.values(1)
    rows = zip(batch.kept(policy.detach()), batch.kept(ref), strict=True)
    ratios = [sum(a) - sum(b) for a, b in rows]
    point = kto_kl(policy, batch.mask, ref)
    assert point.item() == pytest.approx(max(0.0, sum(ratios) / len(ratios)))
    assert not point.requires_grad


def test_averages():
    batch = full_batch(3, 4)
    policy, ref = batch.values(0), batch.values(1)
    labels, kl = torch.tensor([True, False, True]), torch.tensor(0.1)
    output = kto_loss(policy, batch.mask, labels, ref, kl, average_log_prob=True)
    rows = zip(batch.kept(policy), batch.kept(ref), strict=True)
    ratios = [(sum(a) - sum(b)) / len(a) for a, b in rows]
    assert output.rewards.tolist() == pytest.approx([0.1 * ratio for ratio in ratios])
