"""The policy losses against their papers' formulas, token by token in Python's floats."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from liger_ops.losses import entropy_threshold, grpo_loss, off_policy_mask
from loss_batches import LossBatch, full_batch, loss_batches

LOW, HIGH, DELTA, BETA, LENGTH, ITEMS = 0.1, 0.25, 1.6, 0.3, 17, 9.0
CLIPPED = ["grpo", "bnpo", "dr_grpo", "dapo", "luspo"]
LOSS_TYPES = [*CLIPPED, "cispo", "sapo", "vespo"]
OF_ITEMS = ["dapo", "cispo", "vespo"]


def options_of(loss_type: str) -> dict[str, Any]:
    return {
        "loss_type": loss_type,
        "epsilon_low": LOW,
        "epsilon_high": HIGH + (loss_type == "cispo"),
        "delta": DELTA if loss_type in CLIPPED else None,
        "max_completion_length": LENGTH if loss_type == "dr_grpo" else None,
        "num_items_in_batch": ITEMS if loss_type in OF_ITEMS else None,
        "sapo_temperature_pos": 0.9,
        "sapo_temperature_neg": 1.3,
    }


def clipped(r: float, a: float) -> float:
    return min(min(r, DELTA) * a, min(max(r, 1 - LOW), 1 + HIGH) * a)


def objective(loss_type: str, r: float, a: float, log_pi: float, w: float) -> float:
    """Return a token's term of the objective, whose negative is the policy term."""
    if loss_type == "cispo":
        return min(r, 1 + HIGH) * a * log_pi
    if loss_type == "sapo":
        tau = 0.9 if a > 0 else 1.3
        return a * 4 / tau / (1 + math.exp(-tau * (r - 1)))
    if loss_type == "vespo":
        k, rate = (2.0, 3.0) if a >= 0 else (3.0, 2.0)
        return w**k * math.exp(rate * (1 - w)) * a * log_pi
    return clipped(r, a)


def reduced(loss_type: str, rows: list[list[float]]) -> float:
    total = sum(sum(row) for row in rows)
    if loss_type in ("grpo", "sapo"):
        return sum(sum(row) / max(len(row), 1) for row in rows) / len(rows)
    if loss_type == "bnpo":
        return total / max(sum(len(row) for row in rows), 1)
    if loss_type == "dr_grpo":
        return total / (len(rows) * LENGTH)
    return total / (len(rows) if loss_type == "luspo" else ITEMS)


def expected(
    loss_type: str, batch: LossBatch, level: str, with_kl: bool, corrected: bool, vllm: Any
) -> float:
    policy, old, ref = (batch.kept(batch.values(i)) for i in range(3))
    engine = [[1.0] * len(row) for row in policy] if vllm is None else batch.kept(vllm)
    rows = []
    for p, o, f, v, a in zip(policy, old, ref, engine, batch.per_row(0).tolist(), strict=True):
        log_r = [x - y for x, y in zip(p, o, strict=True)]
        if level == "sequence" and log_r:
            log_r = [sum(log_r) / len(log_r)] * len(log_r)
        w = math.exp(sum(log_r) + sum(map(math.log, v)))
        rows.append([])
        for t, log_pi in enumerate(p):
            r = math.exp(log_r[t])
            factor = 1.0 if loss_type == "vespo" else v[t]
            value = -objective(loss_type, r, a, log_pi, w) * factor
            if with_kl:
                ratio = math.exp(f[t] - log_pi)
                value += BETA * (ratio - math.log(ratio) - 1) * (r if corrected else 1.0)
            rows[-1].append(value)
    return reduced(loss_type, rows)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@settings(max_examples=settings().max_examples // 2)
@given(data=st.data())
def test_formula(loss_type, data):
    batch = data.draw(loss_batches())
    with_kl, corrected = data.draw(st.sampled_from([(False, False), (True, False), (True, True)]))
    levels = ["token", "sequence"] if loss_type in CLIPPED else ["token"]
    level = data.draw(st.sampled_from(levels))
    vllm = batch.values(3).exp() if data.draw(st.booleans()) else None
    log_prob = batch.values(0).requires_grad_()
    options = {**options_of(loss_type), "importance_sampling_level": level}
    if with_kl:
        options.update(beta=BETA, use_bias_correction_kl=corrected)

    def call(policy, dtype):
        old, ref = (batch.values(i).to(dtype) for i in (1, 2))
        advantages = batch.per_row(0).to(dtype)
        given_ratio = None if vllm is None else vllm.to(dtype)
        inputs = {"old_log_prob": old, "ref_log_prob": ref, "vllm_is_ratio": given_ratio}
        return grpo_loss(policy, advantages, batch.mask, **inputs, **options)

    output = call(log_prob, torch.float64)
    truth = expected(loss_type, batch, level, with_kl, corrected, vllm)
    torch.testing.assert_close(output.loss.item(), truth, rtol=1e-11, atol=1e-12)
    (gradient,) = torch.autograd.grad(output.loss, log_prob)
    assert gradient.isfinite().all() and not gradient[~batch.mask].any()
    assert not output.per_token_loss[~batch.mask].any()
    narrow = call(log_prob.detach().float(), torch.float32).loss
    assert narrow.dtype is torch.float32
    torch.testing.assert_close(narrow.double(), output.loss.detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_gradient(loss_type, level):
    """By differences; cispo and vespo have a weight that is taken as a constant."""
    if level == "sequence" and loss_type not in CLIPPED:
        level = "token"
    batch = full_batch(3, 3)
    policy, old, ref, entropy = (batch.values(i).nan_to_num() for i in range(4))
    if loss_type in ("cispo", "vespo"):
        options = {**options_of(loss_type), "importance_sampling_level": level}
        log_prob = policy.requires_grad_()
        output = grpo_loss(log_prob, batch.per_row(0), batch.mask, old_log_prob=old, **options)
        (gradient,) = torch.autograd.grad(output.loss, log_prob)
        torch.testing.assert_close(gradient * policy.detach(), output.per_token_loss / ITEMS)
        return
    options = {
        **options_of(loss_type),
        "importance_sampling_level": level,
        "beta": BETA,
        "use_bias_correction_kl": True,
        "entropy_coef": 0.3,
    }

    def loss(x, h):
        inputs = {"old_log_prob": old, "ref_log_prob": ref, "entropy": h}
        return grpo_loss(x, batch.per_row(0), batch.mask, **inputs, **options).loss

    assert torch.autograd.gradcheck(loss, (policy.requires_grad_(), (-entropy).requires_grad_()))


def test_luspo_has_ratios_of_sequences_by_default():
    batch = full_batch(3, 5)

    def loss(**options):
        inputs = {"old_log_prob": batch.values(1), "loss_type": "luspo", **options}
        return grpo_loss(batch.values(0), batch.per_row(0), batch.mask, **inputs).loss

    of_sequences = loss(importance_sampling_level="sequence")
    torch.testing.assert_close(loss(), of_sequences)
    assert not torch.isclose(loss(importance_sampling_level="token"), of_sequences)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_without_old_values_the_ratio_is_one(loss_type):
    """The gradient is then that of REINFORCE, of SAPO too, whose gate has slope 1 there."""
    batch = full_batch(3, 5)
    log_prob, advantages = batch.values(0).requires_grad_(), batch.per_row(0)
    options = {**options_of(loss_type), "sapo_temperature_neg": 0.9}
    options["importance_sampling_level"] = "token"
    (gradient,) = torch.autograd.grad(
        grpo_loss(log_prob, advantages, batch.mask, **options).loss, log_prob
    )
    of_loss = {"luspo": 3.0, "dr_grpo": 3.0 * LENGTH, "bnpo": batch.mask.sum()}
    divisor = of_loss.get(loss_type, ITEMS)
    if loss_type in ("grpo", "sapo"):
        divisor = 3 * batch.mask.sum(-1, keepdim=True)
    truth = (-advantages[:, None] / divisor).expand_as(gradient).masked_fill(~batch.mask, 0.0)
    torch.testing.assert_close(gradient, truth)


def test_advantages_and_ratios_of_any_accepted_shape():
    batch = full_batch(3, 5)
    a, v = batch.per_row(0), batch.per_row(1).exp()
    shapes = [lambda x: x, lambda x: x[:, None], lambda x: x[:, None].expand(3, 5)]
    for loss_type in ("grpo", "cispo", "sapo"):
        first, *others = (
            grpo_loss(
                batch.values(0), shape(a), batch.mask, old_log_prob=batch.values(1),
                vllm_is_ratio=shape(v), **options_of(loss_type),
            ).loss
            for shape in shapes
        )  # fmt: skip
        for other in others:
            torch.testing.assert_close(other, first)


def test_vespo_counts_a_ratio_of_a_sequence_once():
    """A ratio of a token counts for each kept token; what stands at the others does not count."""
    batch = full_batch(2, 4)
    tokens = batch.mask.sum(-1, keepdim=True)
    of_sequence = batch.per_row(1).exp()
    of_tokens = (of_sequence[:, None] ** (1 / tokens)).expand(2, 4).masked_fill(~batch.mask, 7.0)
    losses = [
        grpo_loss(
            batch.values(0), batch.per_row(0), batch.mask, old_log_prob=batch.values(1),
            vllm_is_ratio=ratio, loss_type="vespo",
        ).loss
        for ratio in (of_sequence, of_sequence[:, None], of_tokens)
    ]  # fmt: skip
    torch.testing.assert_close(losses[1], losses[0])
    torch.testing.assert_close(losses[2], losses[0])


@pytest.mark.parametrize("loss_type", OF_ITEMS)
def test_steps_of_accumulation_add_up(loss_type):
    """With the items of the whole batch, the parts of any sizes sum to the whole's loss."""
    batch = full_batch(5, 4)
    options = options_of(loss_type)
    options["num_items_in_batch"] = None

    def loss(rows, **items):
        return grpo_loss(
            batch.values(0)[rows], batch.per_row(0)[rows], batch.mask[rows],
            old_log_prob=batch.values(1)[rows], **{**options, **items},
        ).loss  # fmt: skip

    whole = loss(slice(None))
    for items in (batch.mask.sum(), batch.mask.sum()[None], int(batch.mask.sum())):
        parts = [loss(rows, num_items_in_batch=items) for rows in (slice(1), slice(1, 5))]
        torch.testing.assert_close(sum(parts), whole)


def test_the_entropy_bonus_and_the_metrics():
    batch = full_batch(3, 5)
    entropy = -batch.values(4)
    inputs = {"old_log_prob": batch.values(1), "ref_log_prob": batch.values(2), "beta": BETA}
    values = (batch.values(0), batch.per_row(0), batch.mask)
    output = grpo_loss(*values, **inputs, entropy=entropy, entropy_coef=0.2, loss_type="grpo")
    plain = grpo_loss(*values, **inputs, loss_type="grpo")
    mean = entropy[batch.mask].mean()
    torch.testing.assert_close(output.loss, plain.loss - 0.2 * mean)
    torch.testing.assert_close(output.policy_loss, plain.loss)
    torch.testing.assert_close(output.entropy, mean)
    ratio = (batch.values(0) - batch.values(1)).exp()
    a = batch.per_row(0)[:, None]
    low, high = (ratio < 0.8) & (a < 0), (ratio > 1.2) & (a > 0)
    assert low.any() and high.any()
    torch.testing.assert_close(output.clip_ratio_low, low[batch.mask].float().mean())
    torch.testing.assert_close(output.clip_ratio_high, high[batch.mask].float().mean())
    assert torch.equal(output.is_clipped, (low | high) & batch.mask)
    r = (batch.values(2) - batch.values(0)).exp()[batch.mask]
    kl = r - 1 - r.log()
    torch.testing.assert_close(output.kl, kl.mean())
    torch.testing.assert_close(output.per_token_kl[batch.mask], kl)
    assert not output.per_token_kl[~batch.mask].any() and not output.per_token_kl.requires_grad
    assert plain.entropy is None
    alone = grpo_loss(*values)
    assert alone.kl is alone.per_token_kl is None
    assert grpo_loss(*values, loss_type="sapo").is_clipped is None


def test_a_clipped_sequence_is_clipped_at_every_token():
    batch = full_batch(3, 5)
    values = (batch.values(0), batch.per_row(0), batch.mask)
    inputs = {"old_log_prob": batch.values(1, 3.0), "importance_sampling_level": "sequence"}
    is_clipped = grpo_loss(*values, **inputs).is_clipped
    assert 0 < is_clipped.any(-1).sum() < 3
    assert torch.equal(is_clipped, is_clipped.any(-1, keepdim=True) & batch.mask)


@given(batch=loss_batches(), share=st.sampled_from([0.0, 0.2, 0.37, 0.5, 0.8, 1.0]))
def test_tokens_of_high_entropy(batch, share):
    entropy = -batch.values(4)
    threshold = entropy_threshold(entropy, batch.mask, share)
    if not batch.mask.any():
        assert threshold.item() == math.inf
        return
    torch.testing.assert_close(threshold, entropy[batch.mask].quantile(1 - share))
    kept = (entropy >= threshold) & batch.mask
    inputs = {"old_log_prob": batch.values(1), "entropy": entropy, "entropy_coef": 0.5}
    values = (batch.values(0), batch.per_row(0), batch.mask)
    output = grpo_loss(*values, **inputs, top_entropy_quantile=share)
    whole = grpo_loss(*values, **inputs)
    truth = whole.per_token_loss.masked_fill(~kept, 0.0)
    torch.testing.assert_close(output.per_token_loss, truth)
    bonus = 0.5 * entropy[kept].mean()
    torch.testing.assert_close(output.loss, truth.sum() / batch.mask.sum() - bonus)
    by_threshold = grpo_loss(*values, **inputs, entropy_threshold=threshold)
    torch.testing.assert_close(by_threshold.loss, output.loss)


def test_sequences_off_the_policy_are_dropped():
    batch = full_batch(4, 5)
    policy, sampled = batch.values(0), batch.values(1)
    sampled[1, 0] = torch.nan
    advantages = torch.tensor([1.0, -1.0, -1.0, -1.0])
    moved = []
    for p, s in zip(batch.kept(policy), batch.kept(sampled), strict=True):
        moved.append(
            sum(0.0 if math.isnan(y) else y - x for x, y in zip(p, s, strict=True)) / len(p)
        )
    threshold = sorted(moved[1:])[1]
    keep = off_policy_mask(policy, sampled, advantages, batch.mask, threshold=threshold)
    assert keep.tolist() == [[True], *[[m <= threshold] for m in moved[1:]]]
    assert keep.sum() == 3
    inputs = {"ref_log_prob": batch.values(2), "beta": BETA}
    masked = grpo_loss(policy, advantages, batch.mask, policy_mask=keep, **inputs).per_token_loss
    whole = grpo_loss(policy, advantages, batch.mask, **inputs).per_token_loss
    only_kl = grpo_loss(policy, 0 * advantages, batch.mask, **inputs).per_token_loss
    torch.testing.assert_close(masked, torch.where(keep, whole, only_kl))


def test_kl_of_close_policies_does_not_cancel():
    """exp(x) - 1 - x of x = 1e-3 loses all but four digits in float32."""
    log_prob = torch.tensor([[-1.0]])
    ref = log_prob + 1e-3
    output = grpo_loss(log_prob, torch.zeros(1), torch.ones(1, 1), ref_log_prob=ref, beta=1.0)
    x = (ref.double() - log_prob.double()).item()
    assert output.loss.item() == pytest.approx(math.expm1(x) - x, rel=2e-3)


def test_far_from_the_old_policy_vespo_is_finite():
    log_prob = torch.tensor([[-1e-3], [-200.0]], requires_grad=True)
    old = torch.tensor([[-200.0], [-1e-3]])
    for advantage in (1.0, -1.0):
        loss = grpo_loss(
            log_prob, torch.full((2,), advantage), torch.ones(2, 1), old_log_prob=old,
            vllm_is_ratio=torch.tensor([0.0, 1e30]), loss_type="vespo",
        ).loss  # fmt: skip
        (gradient,) = torch.autograd.grad(loss, log_prob)
        assert loss.isfinite() and gradient.isfinite().all()
