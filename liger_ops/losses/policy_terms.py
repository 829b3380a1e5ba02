"""The policy terms among which `grpo_loss` chooses: a value for each token, from ratios."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .checks import holds
from .sequences import kept


class Ratios(NamedTuple):
    """The values from which the policy term is computed.

    log_prob and log_ratio, (B, T), are zero where the mask is False. ratio is (B, T), or (B, 1) at
    the level of sequences; advantages, and vllm_is_ratio if it is not None, (B, 1) or (B, T).
    """

    log_prob: Tensor
    log_ratio: Tensor
    ratio: Tensor
    advantages: Tensor
    mask: Tensor
    vllm_is_ratio: Tensor | None


class PolicyOptions(NamedTuple):
    epsilon_low: float
    epsilon_high: float
    delta: float | None
    sapo_temperature_pos: float
    sapo_temperature_neg: float
    vespo_k_pos: float
    vespo_lambda_pos: float
    vespo_k_neg: float
    vespo_lambda_neg: float


def clipped(ratios: Ratios, options: PolicyOptions) -> Tensor:
    """Return PPO's term. With delta, the ratio has a bound for negative advantages too."""
    inside = ratios.ratio.clamp(1 - options.epsilon_low, 1 + options.epsilon_high)
    ratio = ratios.ratio if options.delta is None else ratios.ratio.clamp(max=options.delta)
    return corrected(-torch.min(ratio * ratios.advantages, inside * ratios.advantages), ratios)


def cispo(ratios: Ratios, options: PolicyOptions) -> Tensor:
    weight = ratios.ratio.detach().clamp(max=options.epsilon_high)
    return corrected(-weight * ratios.advantages * ratios.log_prob, ratios)


def sapo(ratios: Ratios, options: PolicyOptions) -> Tensor:
    pos, neg = options.sapo_temperature_pos, options.sapo_temperature_neg
    temperature = torch.full_like(ratios.advantages, neg)
    temperature = temperature.masked_fill(ratios.advantages > 0, pos)
    gate = torch.sigmoid(temperature * (ratios.ratio - 1)) * 4 / temperature
    return corrected(-gate * ratios.advantages, ratios)


def vespo(ratios: Ratios, options: PolicyOptions) -> Tensor:
    return -vespo_weight(ratios, options) * ratios.advantages * ratios.log_prob


# The bounds of log-ratios in the code of VESPO's authors.
LOG_SMALLEST, LOG_LARGEST = math.log(1e-8), 20.0


def vespo_weight(ratios: Ratios, options: PolicyOptions) -> Tensor:
    """Return phi(w) = w^k exp(lambda (1 - w)) of the sequence's ratio w, without gradient."""
    log_ratio = ratios.log_ratio.detach().clamp(-LOG_LARGEST, LOG_LARGEST)
    log_w = log_ratio.sum(-1, keepdim=True)
    if ratios.vllm_is_ratio is not None:
        log_is = ratios.vllm_is_ratio.log().clamp(LOG_SMALLEST, LOG_LARGEST)
        if not holds(log_is.shape[1] == 1) or holds(ratios.mask.shape[1] == 1):
            log_is = kept(log_is, ratios.mask)
        log_w = log_w + log_is.sum(-1, keepdim=True)
    log_w = log_w.clamp(LOG_SMALLEST, LOG_LARGEST)
    negative = ratios.advantages < 0
    k = torch.full_like(ratios.advantages, options.vespo_k_pos)
    k = k.masked_fill(negative, options.vespo_k_neg)
    rate = torch.full_like(ratios.advantages, options.vespo_lambda_pos)
    rate = rate.masked_fill(negative, options.vespo_lambda_neg)
    return torch.exp(k * log_w - rate * torch.expm1(log_w))


def corrected(term: Tensor, ratios: Ratios) -> Tensor:
    """Return the term times vllm_is_ratio, the trainer's probability over the sampler's."""
    return term if ratios.vllm_is_ratio is None else term * ratios.vllm_is_ratio


CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
POLICY_TERMS: dict[str, Callable[[Ratios, PolicyOptions], Tensor]] = {
    **dict.fromkeys(CLIPPED, clipped),
    "cispo": cispo,
    "sapo": sapo,
    "vespo": vespo,
}


def clip_flags(
    loss_type: str, ratios: Ratios, options: PolicyOptions
) -> tuple[Tensor | None, Tensor | None]:
    """Return where the ratio is beyond its lower bound, and where it is beyond its upper bound.

    There the token gets no gradient (in cispo a smaller one). A bound that the loss type does not
    have is None.
    """
    if loss_type in CLIPPED:
        low = (ratios.ratio < 1 - options.epsilon_low) & (ratios.advantages < 0)
        return low, (ratios.ratio > 1 + options.epsilon_high) & (ratios.advantages > 0)
    if loss_type == "cispo":
        return None, (ratios.ratio > options.epsilon_high) & (ratios.advantages > 0)
    return None, None
