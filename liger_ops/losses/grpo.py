"""Group relative policy optimisation (GRPO), and later policy losses."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ops.tensors import widened
from .checks import (
    check_choice,
    check_items,
    check_number,
    check_per_sequence,
    check_values,
    holds,
)
from .policy_terms import (
    CLIPPED,
    OF_ITEMS,
    POLICY_TERMS,
    REDUCTIONS,
    Divisors,
    PolicyOptions,
    Ratios,
    clip_flags,
    column,
    k3,
    log_importance,
)
from .policy_terms import entropy_threshold as threshold_of
from .sequences import check_batch, kept


class PolicyOutput(NamedTuple):
    """The output of a policy loss. Only loss and per_token_loss have a gradient.

    loss is a scalar. per_token_loss, (B, T), is the policy term plus beta * KL, and zero where the
    mask is zero: it is reduced to policy_loss, which is loss without the entropy bonus. kl and
    entropy are means over the kept tokens, and the clip ratios are shares of the kept tokens.
    per_token_kl, (B, T), is the KL term without beta; is_clipped, (B, T) and bool, says whether a
    bound of the ratio applies. Both are zero where the mask is zero. A field is None if the loss
    has no such part.
    """

    loss: Tensor
    per_token_loss: Tensor
    policy_loss: Tensor
    kl: Tensor | None
    entropy: Tensor | None
    clip_ratio_low: Tensor | None
    clip_ratio_high: Tensor | None
    per_token_kl: Tensor | None
    is_clipped: Tensor | None


def grpo_loss(
    log_prob: Tensor, advantages: Tensor, mask: Tensor, *, old_log_prob: Tensor | None = None,
    ref_log_prob: Tensor | None = None, entropy: Tensor | None = None,
    vllm_is_ratio: Tensor | None = None, policy_mask: Tensor | None = None,
    num_items_in_batch: Tensor | float | None = None, loss_type: str = "dapo", beta: float = 0.0,
    epsilon_low: float = 0.2, epsilon_high: float | None = None, delta: float | None = None,
    importance_sampling_level: str | None = None, use_bias_correction_kl: bool = False,
    max_completion_length: int | None = None, entropy_coef: float = 0.0,
    top_entropy_quantile: float = 1.0, entropy_threshold: Tensor | None = None,
    sapo_temperature_pos: float = 1.0, sapo_temperature_neg: float = 1.05,
    vespo_k_pos: float = 2.0, vespo_lambda_pos: float = 3.0,
    vespo_k_neg: float = 3.0, vespo_lambda_neg: float = 2.0,
) -> PolicyOutput:  # fmt: skip
    """Compute a policy loss of sampled responses with advantages, from log-probabilities of tokens.

    With r = pi / pi_old of a token or, at the level of sequences, exp of the mean of log r over a
    response's tokens; A the advantage; sg(x) the value of x without gradient; s the logistic
    function:

        grpo, bnpo, dr_grpo, dapo, luspo:
               term = -min(min(r, delta) A, clip(r, 1 - epsilon_low, 1 + epsilon_high) A)
        cispo: term = -sg(min(r, epsilon_high)) A log pi
        sapo:  term = -4 / tau s(tau (r - 1)) A; tau is sapo_temperature_pos if A > 0, else _neg
        vespo: term = -sg(w^k exp(lambda (1 - w))) A log pi, where w is the product of r and
               vllm_is_ratio over the response; k and lambda are vespo_*_neg if A < 0, else _pos
        kl   = pi_ref / pi - 1 - log(pi_ref / pi); times r with use_bias_correction_kl
        per_token_loss = term * vllm_is_ratio * policy_mask + beta * kl

    vllm_is_ratio is not applied again in vespo. The losses are reduced in different ways:

        grpo, sapo          the mean over a response's tokens, then over the B responses
        bnpo                the sum divided by the kept tokens
        dapo, cispo, vespo  the sum divided by num_items_in_batch, or if None by the kept tokens
        dr_grpo             the sum divided by B * max_completion_length
        luspo               the sum divided by B

        loss = the reduced per_token_loss - entropy_coef * the mean of the entropy

    `docs/losses.md` lists the papers, and where this differs from TRL or Liger-Kernel. If no token
    is kept, the loss is a zero with zero gradients.

    Args:
        log_prob: (B, T), floating point: the log-probability of each token.
        advantages: (B,), (B, 1) or (B, T), without gradient.
        mask: (B, T): a token is kept where the mask is not zero. The values of the other arguments
            at other tokens have no effect, even NaN and inf.
        old_log_prob: (B, T), without gradient: of the policy that sampled. If None, it is log_prob
            itself: r is 1 and has a gradient.
        ref_log_prob: (B, T), without gradient: of the reference; needed if beta is not 0.
        entropy: (B, T): of the policy at each token; needed for entropy_coef, top_entropy_quantile
            and entropy_threshold.
        vllm_is_ratio: (B,), (B, 1) or (B, T), without gradient: pi_old divided by the probability
            in the sampling engine.
        policy_mask: (B,), (B, 1) or (B, T): where it is zero, the policy term is left out, but
            neither the KL term nor the token in the divisor; see `off_policy_mask`.
        num_items_in_batch: the number of kept tokens of the whole batch, over all steps of
            accumulation; where gradients are averaged over processes, it is divided by the number
            of processes. A number or a tensor of one, at least 1. The caller reduces it over
            processes, outside a compiled region.
        loss_type: one of the names above.
        beta: the weight of the KL term, at least 0.
        epsilon_low, epsilon_high: the bounds of r, at least 0; epsilon_high is epsilon_low if None.
            In cispo epsilon_high is the largest weight itself, as in ScaleRL, and must be given:
            ScaleRL's value is 5, and MiniMax-M1's is 1 + its epsilon_high.
        delta: the largest r for negative advantages, of INTELLECT-2; only for the loss types that
            clip r: grpo, bnpo, dr_grpo, dapo and luspo.
        importance_sampling_level: token or sequence; None is sequence for luspo, else token. cispo,
            sapo and vespo accept token alone.
        use_bias_correction_kl: whether the KL term is multiplied by r, as in DeepSeek-V3.2, whose r
            is of tokens.
        max_completion_length: the longest response that can be sampled; needed by dr_grpo.
        entropy_coef: the weight of the entropy bonus, which is a mean over the kept tokens, or over
            those of high entropy.
        top_entropy_quantile: keep in the policy term the share of tokens with the highest entropy,
            in [0, 1].
        entropy_threshold: keep in the policy term the tokens of at least this entropy, a tensor of
            one number, instead of the threshold that top_entropy_quantile has for these tokens; see
            `liger_ops.losses.entropy_threshold`.
        sapo_temperature_pos, sapo_temperature_neg: above 0.
        vespo_k_pos, vespo_lambda_pos, vespo_k_neg, vespo_lambda_neg: at least 0.

    Returns:
        PolicyOutput, computed in float64 for float64 log_prob, else in float32.

    Raises:
        TypeError: a tensor of log-probabilities or entropy is not a floating-point tensor, an
            option is not of its type, or a tensor is None that another option needs.
        ValueError: a shape is not one of those above, an option is outside its range, or the loss
            type does not use an option that is given.

    Example:
        >>> log_prob, mask = torch.full((2, 3), -1.0), torch.ones(2, 3)
        >>> liger_ops.losses.grpo_loss(log_prob, torch.tensor([1.0, -0.5]), mask).loss
        tensor(-0.2500)
    """
    check_tensors(
        log_prob, advantages, mask, old_log_prob, ref_log_prob, vllm_is_ratio, policy_mask
    )
    level = importance_sampling_level or ("sequence" if loss_type == "luspo" else "token")
    check_choices(loss_type, level, epsilon_high, delta, max_completion_length, num_items_in_batch)
    check_kl(beta, ref_log_prob, use_bias_correction_kl)
    check_number("grpo_loss", "epsilon_low", epsilon_low, at_least=0)
    epsilon_high = epsilon_low if epsilon_high is None else epsilon_high
    options = PolicyOptions(
        epsilon_low, epsilon_high, delta, sapo_temperature_pos, sapo_temperature_neg,
        vespo_k_pos, vespo_lambda_pos, vespo_k_neg, vespo_lambda_neg,
    )  # fmt: skip
    check_options(options)
    check_entropy(log_prob, entropy, entropy_coef, top_entropy_quantile, entropy_threshold)

    mask = mask != 0
    values = kept(widened(log_prob), mask)
    ratios = compute_ratios(values, advantages, mask, old_log_prob, vllm_is_ratio, level)
    losses = POLICY_TERMS[loss_type](ratios, options)
    if policy_mask is not None:
        losses = losses.masked_fill(column(policy_mask) == 0, 0.0)
    bonus_mask = mask
    if entropy is not None and (top_entropy_quantile < 1 or entropy_threshold is not None):
        bonus_mask = high_entropy(entropy, mask, top_entropy_quantile, entropy_threshold)
        losses = losses.masked_fill(~bonus_mask, 0.0)
    kl = None
    if ref_log_prob is not None and beta != 0:
        kl = k3(values, kept(ref_log_prob.detach().to(values.dtype), mask))
        kl = kl * ratios.ratio if use_bias_correction_kl else kl
        losses = losses + beta * kl
    losses = kept(losses.expand_as(values), mask)
    divisors = Divisors(mask, max_completion_length, num_items_in_batch)
    policy_loss = loss = REDUCTIONS[loss_type](losses, divisors)
    if entropy is not None and entropy_coef != 0:
        loss = loss - entropy_coef * token_mean(widened(entropy).to(values.dtype), bonus_mask)
    low, high = clip_flags(loss_type, ratios, options)
    return PolicyOutput(
        loss, losses, policy_loss.detach(),
        metric(kl, mask), metric(entropy, mask), metric(low, mask), metric(high, mask),
        None if kl is None else kept(kl.detach(), mask),
        None if high is None else (high if low is None else low | high) & mask,
    )  # fmt: skip


def compute_ratios(
    values: Tensor, advantages: Tensor, mask: Tensor, old_log_prob: Tensor | None,
    vllm_is_ratio: Tensor | None, level: str,
) -> Ratios:  # fmt: skip
    """Return the values from which the policy term is computed."""
    old = values if old_log_prob is None else kept(old_log_prob.to(values.dtype), mask)
    log_ratio = values - old.detach()
    ratio = log_importance(log_ratio, mask, level).exp()
    weights = None if vllm_is_ratio is None else of_tokens(vllm_is_ratio, mask, values.dtype)
    return Ratios(
        values, log_ratio, ratio, of_tokens(advantages, mask, values.dtype), mask, weights
    )


def of_tokens(x: Tensor, mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x as (B, 1) or (B, T), without gradient; (B, T) is zero where the mask is False."""
    x = column(x.detach()).to(dtype)
    return x if holds(x.shape[1] == 1) and not holds(mask.shape[1] == 1) else kept(x, mask)


def high_entropy(entropy: Tensor, mask: Tensor, share: float, threshold: Tensor | None) -> Tensor:
    """Return the mask of kept tokens with at least the threshold's entropy, or that of `share`."""
    if threshold is None:
        threshold = threshold_of(entropy, mask, share)
    return mask & (widened(entropy.detach()) >= threshold.detach().reshape(()))


def token_mean(x: Tensor, mask: Tensor) -> Tensor:
    return kept(x, mask).sum() / mask.sum().clamp(min=1)


def metric(x: Tensor | None, mask: Tensor) -> Tensor | None:
    """Return the mean of x over the kept tokens, without gradient."""
    if x is None:
        return None
    x = x.detach() if x.dtype.is_floating_point else x.float()
    return token_mean(widened(x).expand_as(mask), mask)


def check_tensors(
    log_prob: Any, advantages: Any, mask: Any, old_log_prob: Any, ref_log_prob: Any,
    vllm_is_ratio: Any, policy_mask: Any,
) -> None:  # fmt: skip
    check_batch("grpo_loss", log_prob, mask)
    check_per_sequence("grpo_loss", "advantages", advantages, log_prob)
    if old_log_prob is not None:
        check_values("grpo_loss", "old_log_prob", old_log_prob, like=log_prob)
    if ref_log_prob is not None:
        check_values("grpo_loss", "ref_log_prob", ref_log_prob, like=log_prob)
    if vllm_is_ratio is not None:
        check_per_sequence("grpo_loss", "vllm_is_ratio", vllm_is_ratio, log_prob)
    if policy_mask is not None:
        check_per_sequence("grpo_loss", "policy_mask", policy_mask, log_prob)


def check_choices(
    loss_type: str, level: str, epsilon_high: Any, delta: Any, max_completion_length: Any,
    num_items_in_batch: Any,
) -> None:  # fmt: skip
    check_choice("grpo_loss", "loss_type", loss_type, POLICY_TERMS)
    check_choice("grpo_loss", "importance_sampling_level", level, ("token", "sequence"))
    if level == "sequence" and loss_type not in CLIPPED:
        raise ValueError(
            "grpo_loss: importance_sampling_level must be token for cispo, sapo and vespo, got"
            f" {level!r} for {loss_type}"
        )
    if loss_type == "cispo" and epsilon_high is None:
        raise ValueError(
            "grpo_loss: epsilon_high must be a number for cispo, the largest weight itself (5 in"
            " ScaleRL), got None"
        )
    if delta is not None and loss_type not in CLIPPED:
        raise ValueError(
            f"grpo_loss: delta must be None for cispo, sapo and vespo, got {delta} for {loss_type}"
        )
    if loss_type == "dr_grpo":
        length = max_completion_length
        check_number("grpo_loss", "max_completion_length of dr_grpo", length, above=0)
    if num_items_in_batch is not None and loss_type not in OF_ITEMS:
        raise ValueError(
            "grpo_loss: num_items_in_batch must be None but for dapo, cispo and vespo, got a"
            f" value for {loss_type}"
        )
    check_items("grpo_loss", num_items_in_batch)


def check_kl(beta: Any, ref_log_prob: Tensor | None, use_bias_correction_kl: bool) -> None:
    check_number("grpo_loss", "beta", beta, at_least=0)
    if beta != 0 and ref_log_prob is None:
        raise TypeError("grpo_loss: ref_log_prob must be a tensor if beta is not 0, got None")
    if beta == 0 and use_bias_correction_kl:
        raise ValueError("grpo_loss: use_bias_correction_kl must be False if beta is 0, got True")


def check_options(options: PolicyOptions) -> None:
    for name in ("sapo_temperature_pos", "sapo_temperature_neg"):
        check_number("grpo_loss", name, getattr(options, name), above=0)
    for name in ("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"):
        check_number("grpo_loss", name, getattr(options, name), at_least=0)
    check_number("grpo_loss", "epsilon_high", options.epsilon_high, at_least=0)
    if options.delta is not None:
        check_number("grpo_loss", "delta", options.delta, above=0)


def check_entropy(log_prob: Tensor, entropy: Any, coef: Any, share: Any, threshold: Any) -> None:
    check_number("grpo_loss", "entropy_coef", coef)
    check_number("grpo_loss", "top_entropy_quantile", share, at_least=0, at_most=1)
    if threshold is not None:
        if not isinstance(threshold, Tensor):
            raise TypeError(
                "grpo_loss: entropy_threshold must be a tensor of one number or None, got"
                f" {type(threshold).__name__}"
            )
        if threshold.numel() != 1:
            raise ValueError(
                "grpo_loss: entropy_threshold must be a tensor of one number, got shape"
                f" {tuple(threshold.shape)}"
            )
        if share != 1:
            raise ValueError(
                f"grpo_loss: top_entropy_quantile must be 1 beside entropy_threshold, got {share}"
            )
    if entropy is not None:
        check_values("grpo_loss", "entropy", entropy, like=log_prob)
    elif coef != 0 or share != 1 or threshold is not None:
        raise TypeError(
            "grpo_loss: entropy must be a tensor for entropy_coef, top_entropy_quantile and"
            " entropy_threshold, got None"
        )
