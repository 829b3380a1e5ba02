"""Direct preference optimisation (DPO), f-DPO, and later losses of preference pairs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from .checks import check_choice, check_number, check_per_sequence
from .outputs import PreferenceOutput
from .pair_losses import OF_DIFFERENCES, PAIR_LOSSES, SMOOTHED, SORTED, PairOptions, Pairs
from .sequences import (
    Sequences,
    batch_mean,
    check_pairs,
    halves,
    nll,
    reference_values,
    sequence_values,
)

# The largest exponent; exp overflows in float32 above 88. A pair beyond CAP has a finite loss, and
# no gradient.
CAP = 80.0


def reverse_kl(log_u: Tensor, alpha: float) -> Tensor:
    """Return f'(u) = log u + 1 without the constant, of f(u) = u log u."""
    return log_u


def forward_kl(log_u: Tensor, alpha: float) -> Tensor:
    """Return f'(u) = -1 / u plus 1, which is 0 for u = 1, of f(u) = -log u."""
    return -torch.expm1((-log_u).clamp(max=CAP))


def js_divergence(log_u: Tensor, alpha: float) -> Tensor:
    """Return f'(u) = log(2u / (1 + u)), of f(u) = u log u - (u + 1) log((u + 1) / 2)."""
    return math.log(2) + logsigmoid(log_u)


def alpha_divergence(log_u: Tensor, alpha: float) -> Tensor:
    """Return f'(u) = (1 - u^-alpha) / alpha, whose limit for alpha = 0 is log u."""
    return -torch.expm1((-alpha * log_u).clamp(max=CAP)) / alpha if alpha != 0 else log_u


# Constants may be left out or added, because they cancel: only differences of f' are used.
F_DIVERGENCES: dict[str, Callable[[Tensor, float], Tensor]] = {
    f.__name__: f for f in (reverse_kl, forward_kl, js_divergence, alpha_divergence)
}


def dpo_loss(
    log_prob: Tensor, mask: Tensor, ref_log_prob: Tensor | None = None, *,
    beta: float = 0.1, loss_type: str | Sequence[str] = "sigmoid",
    loss_weights: Sequence[float] | None = None, label_smoothing: float = 0.0,
    average_log_prob: bool = False, f_divergence_type: str = "reverse_kl",
    f_alpha_divergence_coef: float = 0.5, ld_alpha: float | None = None,
    discopop_tau: float = 0.05, reward_shift: Tensor | float | None = None,
    pair_weight: Tensor | None = None,
) -> PreferenceOutput:  # fmt: skip
    """Compute a loss of preference pairs against a reference, from log-probabilities of tokens.

        loss = sum over the loss types i of loss_weights[i] * mean over the pairs of loss_i

    With s(x) the logistic function, e label_smoothing, w and l the log-ratios of policy and
    reference for the chosen and the rejected response, |w| and |l| the numbers of their tokens,
    r_w = beta w, r_l = beta l, and d = beta (w - l):

        sigmoid       -(1 - e) log s(d) - e log s(-d)                  DPO; with e, cDPO
        hinge         max(0, 1 - d)                                    SLiC, RSO
        ipo           (w / |w| - l / |l| - 1 / (2 beta))^2             IPO, per token
        exo_pair      KL of (s(d), s(-d)) from (1 - e, e)              EXO
        nca_pair      -log s(r_w) - log s(-r_w) / 2 - log s(-r_l) / 2  NCA
        robust        (-(1 - e) log s(d) + e log s(-d)) / (1 - 2 e)    robust DPO
        bco_pair      -log s(r_w - shift) - log s(shift - r_l)         BCO
        sppo_hard     (w - 1 / (2 beta))^2 + (l + 1 / (2 beta))^2      SPPO, wins of 1 and 0
        aot           sigmoid of sorted margins of policy and reference            AOT
        aot_unpaired  sigmoid of sorted w and sorted l                             AOT
        apo_zero      s(-r_w) + s(r_l)                                 APO, eq. 7
        apo_down      s(r_w) + s(r_l - r_w)                            APO, eq. 8
        discopop      -(1 - m) log s(d) + m exp(-d), m = s(d / discopop_tau)       DiscoPOP, eq. 5
        sft           mean of -log_prob over the chosen responses' tokens
        sigmoid_norm  sigmoid of beta (w / |w| - l / |l|)              Tulu 3

    `docs/losses.md` lists the papers, and where this differs from TRL or Liger-Kernel.

    A pair without any kept token gives zero. It still counts in the mean.

    Args:
        log_prob: (2B, T), floating point: the log-probabilities of the chosen responses' tokens,
            then those of the rejected ones.
        mask: (2B, T): a token is kept where the mask is not zero.
        ref_log_prob: the reference's log-probabilities, without gradient: (2B, T), or (2B,), the
            results of `sequence_log_prob` with the same options. If None, the log-ratios are the
            policy's log-probabilities.
        beta: above 0.
        loss_type: one of the names above, or a list or tuple of them.
        loss_weights: a weight for each loss type; 1 each if None.
        label_smoothing: e, in [0, 1); for robust below 0.5, for exo_pair above 0. ValueError if
            it is not 0 and no loss type has an e.
        average_log_prob: take means over tokens instead of sums; ipo and sigmoid_norm always do.
        f_divergence_type: reverse_kl, forward_kl, js_divergence or alpha_divergence, of f-DPO: in
            d, ipo and sigmoid_norm, f'(pi / pi_ref) takes the place of the log-ratio. nca_pair,
            bco_pair, sppo_hard, aot, aot_unpaired, apo_zero and apo_down accept reverse_kl alone.
        f_alpha_divergence_coef: alpha of f'(u) = (1 - u^-alpha) / alpha.
        ld_alpha: see `sequence_log_prob`.
        discopop_tau: above 0.
        reward_shift: for bco_pair alone: the mean of all rewards, which the caller keeps as a
            running mean; a number, or a tensor of shape (). None is 0.
        pair_weight: (B,), without gradient: a factor of each pair's loss, as in WPO. Not for aot
            and aot_unpaired, which sort the pairs.

    Returns:
        PreferenceOutput, computed in float64 for float64 log_prob, else in float32.

    Raises:
        TypeError: log_prob or ref_log_prob is not a floating-point tensor, or an option is not of
            its type.
        ValueError: log_prob is not (2B, T), mask or ref_log_prob does not have its shape, an option
            is outside its range, or the loss types do not use an option that is given.

    Example:
        >>> log_prob, mask = torch.zeros(2, 3), torch.ones(2, 3)
        >>> liger_ops.losses.dpo_loss(log_prob, mask).loss
        tensor(0.6931)
    """
    check_pairs("dpo_loss", log_prob, mask)
    check_lists(loss_type, loss_weights)
    types = (loss_type,) if isinstance(loss_type, str) else tuple(loss_type)
    weights = (1.0,) * len(types) if loss_weights is None else tuple(loss_weights)
    check_types(types, weights, label_smoothing, f_divergence_type)
    check_number("dpo_loss", "beta", beta, above=0)
    check_number("dpo_loss", "discopop_tau", discopop_tau, above=0)
    check_number("dpo_loss", "f_alpha_divergence_coef", f_alpha_divergence_coef)
    check_factors(types, log_prob, reward_shift, pair_weight)

    mask = mask != 0
    policy = sequence_values("dpo_loss", log_prob, mask, average_log_prob, ld_alpha)
    ref = reference_values(
        "dpo_loss", log_prob, mask, ref_log_prob, policy, average_log_prob, ld_alpha
    )
    pairs = pair_values(
        log_prob, mask, policy, ref, average_log_prob, f_divergence_type, f_alpha_divergence_coef
    )
    shift = reward_shift.detach() if isinstance(reward_shift, Tensor) else reward_shift or 0.0
    options = PairOptions(beta, label_smoothing, discopop_tau, shift)
    loss = sum_of_losses(pairs, options, types, weights, pair_weight)
    chosen, rejected = halves(policy.log_prob.detach())
    rewards = halves(beta * (policy.log_prob - ref).detach())
    return PreferenceOutput(loss, chosen, rejected, *rewards, pairs.nll_loss.detach())


def sum_of_losses(
    pairs: Pairs, options: PairOptions, types: Sequence[str], weights: Sequence[float],
    pair_weight: Tensor | None,
) -> Tensor:  # fmt: skip
    """Return the weighted sum over the loss types of the mean over the pairs."""
    total = pairs.margin.new_zeros(())
    for name, weight in zip(types, weights, strict=True):
        losses = PAIR_LOSSES[name](pairs, options)
        # sft has one value for the batch; sorted losses have set absent pairs to 0 themselves.
        if losses.dim() == 0:
            losses = losses.expand_as(pairs.margin)
        elif name not in SORTED:
            losses = losses.masked_fill(~pairs.present, 0.0)
        if pair_weight is not None:
            losses = losses * pair_weight.detach().to(losses.dtype)
        total = total + weight * batch_mean(losses)
    return total


def pair_values(
    log_prob: Tensor, mask: Tensor, policy: Sequences, ref: Tensor, is_average: bool,
    f_divergence_type: str, alpha: float,
) -> Pairs:  # fmt: skip
    """Return the values of the pairs from those of the 2B sequences."""
    logratio = policy.log_prob - ref
    # A log-ratio that is a mean already is not divided by its length again.
    lengths = torch.ones_like(policy.tokens) if is_average else policy.tokens.clamp(min=1)
    chosen, rejected = halves(policy.log_prob)
    ref_chosen, ref_rejected = halves(ref)
    chosen_tokens, rejected_tokens = halves(policy.tokens)
    score = F_DIVERGENCES[f_divergence_type](logratio, alpha)
    return Pairs(
        *halves(logratio), *halves(score), *halves(lengths),
        margin=chosen - rejected, ref_margin=ref_chosen - ref_rejected,
        present=chosen_tokens + rejected_tokens > 0,
        nll_loss=nll(halves(log_prob)[0], halves(mask)[0], policy.log_prob.dtype),
    )  # fmt: skip


def check_lists(loss_type: Any, loss_weights: Any) -> None:
    if not isinstance(loss_type, (str, list, tuple)):
        raise TypeError(
            "dpo_loss: loss_type must be a str, or a list or tuple of them, got"
            f" {type(loss_type).__name__}"
        )
    if loss_weights is not None and not isinstance(loss_weights, (list, tuple)):
        raise TypeError(
            "dpo_loss: loss_weights must be a list or tuple of numbers, or None, got"
            f" {type(loss_weights).__name__}"
        )


def check_types(
    types: Sequence[str], weights: Sequence[float], label_smoothing: float, f_divergence_type: str
) -> None:
    for name in types:
        check_choice("dpo_loss", "loss_type", name, PAIR_LOSSES)
    if not types or len(weights) != len(types):
        raise ValueError(
            "dpo_loss: loss_weights must hold a number for each loss type, at least one, got"
            f" {len(weights)} for {len(types)}"
        )
    for weight in weights:
        check_number("dpo_loss", "loss_weights", weight)
    check_choice("dpo_loss", "f_divergence_type", f_divergence_type, F_DIVERGENCES)
    for name in types:
        if f_divergence_type != "reverse_kl" and name not in OF_DIFFERENCES:
            raise ValueError(
                f"dpo_loss: f_divergence_type must be reverse_kl for the loss type {name}, got"
                f" {f_divergence_type!r}"
            )
    check_number("dpo_loss", "label_smoothing", label_smoothing, at_least=0, below=1)
    if "robust" in types:
        check_number("dpo_loss", "label_smoothing of robust", label_smoothing, below=0.5)
    if "exo_pair" in types:
        check_number("dpo_loss", "label_smoothing of exo_pair", label_smoothing, above=0)
    if label_smoothing != 0 and not any(name in SMOOTHED for name in types):
        raise ValueError(
            f"dpo_loss: label_smoothing must be 0 for loss types without labels to smooth, got"
            f" {label_smoothing} for {', '.join(types)}"
        )


def check_factors(
    types: Sequence[str], log_prob: Tensor, reward_shift: Any, pair_weight: Any
) -> None:
    if reward_shift is not None:
        if "bco_pair" not in types:
            raise ValueError(
                "dpo_loss: reward_shift must be None without the loss type bco_pair, got"
                f" {', '.join(types)}"
            )
        if not isinstance(reward_shift, Tensor):
            check_number("dpo_loss", "reward_shift", reward_shift)
        elif reward_shift.dim() != 0:
            raise ValueError(
                f"dpo_loss: reward_shift must be of shape (), got {tuple(reward_shift.shape)}"
            )
    if pair_weight is not None:
        check_per_sequence(
            "dpo_loss", "pair_weight", pair_weight, halves(log_prob)[0], of_tokens=False
        )
        for name in types:
            if name in SORTED:
                raise ValueError(
                    f"dpo_loss: pair_weight must be None for the loss type {name}, which sorts"
                    f" the pairs, got a tensor of shape {tuple(pair_weight.shape)}"
                )
