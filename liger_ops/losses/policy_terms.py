"""Parts of policy losses: importance ratios of policies and estimates of their divergence, the
terms among which `grpo_loss` chooses, a value for each token, their reductions to the loss of a
batch, which differ in the divisor, and thresholds of the entropy of tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..ops.tensors import widened
from .checks import check_mask, check_number, check_per_sequence, check_values, holds
from .sequences import batch_mean, check_batch, kept, token_counts


def k3(log_prob: Tensor, ref_log_prob: Tensor) -> Tensor:
    """Return the estimate r - 1 - log r of KL(pi || pi_ref), with r = pi_ref / pi: never negative.

    Source: John Schulman, http://joschu.net/blog/kl-approx.html; GRPO, arXiv:2402.03300.
    """
    log_r = ref_log_prob - log_prob
    return torch.expm1(log_r) - log_r


def log_importance(log_ratio: Tensor, mask: Tensor, level: str) -> Tensor:
    """Return log_ratio, (B, T), or for the level "sequence" its mean over kept tokens, (B, 1)."""
    if level == "token":
        return log_ratio
    tokens = token_counts(mask, log_ratio.dtype).clamp(min=1)
    return (log_ratio.sum(-1) / tokens)[:, None]


def off_policy_mask(
    log_prob: Tensor, sampling_log_prob: Tensor, advantages: Tensor, mask: Tensor, *,
    threshold: float,
) -> Tensor:  # fmt: skip
    """Compute the mask that drops sequences of negative advantage that are off-policy.

    These are sequences from which the policy has moved away since they were sampled:

        drop where advantage < 0 and mean over the kept tokens of
            sampling_log_prob - log_prob > threshold

    `grpo_loss` takes it as policy_mask.

    Args:
        log_prob, sampling_log_prob, mask: (B, T). A token whose difference is NaN, as where the
            sampler could not score it, counts as a difference of zero.
        advantages: (B,), (B, 1) or (B, T).
        threshold: delta in the paper.

    Returns:
        A bool tensor of shape (B, 1), or (B, T) for advantages of that shape.

    Raises:
        TypeError: log_prob or sampling_log_prob is not a floating-point tensor, mask or advantages
            is not a tensor, or threshold is not a number.
        ValueError: log_prob is not (B, T), mask or sampling_log_prob does not have its shape, or
            advantages has none of the shapes above.

    Source: DeepSeek-V3.2, arXiv:2512.02556, eq. 9.
    """
    check_batch("off_policy_mask", log_prob, mask)
    check_values("off_policy_mask", "sampling_log_prob", sampling_log_prob, like=log_prob)
    check_per_sequence("off_policy_mask", "advantages", advantages, log_prob)
    check_number("off_policy_mask", "threshold", threshold)
    mask = mask != 0
    values = widened(log_prob.detach())
    moved = kept(sampling_log_prob.detach().to(values.dtype) - values, mask)
    moved = log_importance(moved.masked_fill(moved.isnan(), 0.0), mask, "sequence")
    return (column(advantages) >= 0) | (moved <= threshold)


def column(x: Tensor) -> Tensor:
    """Return values of sequences, (B,), as (B, 1); other values as they are."""
    return x[:, None] if x.dim() == 1 else x


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


class Divisors(NamedTuple):
    """The mask, and the caller's numbers for the whole batch."""

    mask: Tensor
    max_completion_length: int | None
    num_items_in_batch: Tensor | float | None


def per_sequence(losses: Tensor, divisors: Divisors) -> Tensor:
    tokens = token_counts(divisors.mask, losses.dtype).clamp(min=1)
    return batch_mean(losses.sum(-1) / tokens)


def per_token(losses: Tensor, divisors: Divisors) -> Tensor:
    return losses.sum() / divisors.mask.sum().clamp(min=1)


def per_item(losses: Tensor, divisors: Divisors) -> Tensor:
    return losses.sum() / item_count(divisors.num_items_in_batch, divisors.mask, losses.dtype)


def item_count(items: Tensor | float | None, mask: Tensor, dtype: torch.dtype) -> Tensor | float:
    """Return num_items_in_batch, or the number of kept tokens in its place; at least 1."""
    if items is None:
        return mask.sum().clamp(min=1)
    if isinstance(items, Tensor):
        items = items.detach().to(mask.device, dtype, non_blocking=True)
        return items.clamp(min=1).reshape(())
    return max(items, 1)


def per_length(losses: Tensor, divisors: Divisors) -> Tensor:
    assert divisors.max_completion_length is not None  # grpo_loss checks it.
    return batch_mean(losses.sum(-1)) / divisors.max_completion_length


def summed(losses: Tensor, divisors: Divisors) -> Tensor:
    return batch_mean(losses.sum(-1))


REDUCTIONS: dict[str, Callable[[Tensor, Divisors], Tensor]] = {
    **dict.fromkeys(("grpo", "sapo"), per_sequence), "bnpo": per_token, "dr_grpo": per_length,
    **dict.fromkeys(("dapo", "cispo", "vespo"), per_item), "luspo": summed,
}  # fmt: skip
OF_ITEMS = tuple(name for name, reduction in REDUCTIONS.items() if reduction is per_item)


def entropy_threshold(entropy: Tensor, mask: Tensor, top_entropy_quantile: float) -> Tensor:
    """Compute the entropy that a share of top_entropy_quantile of the kept tokens reaches.

    It is the quantile 1 - top_entropy_quantile of the kept tokens' entropies, with linear
    interpolation as in `torch.quantile`, and inf if no token is kept. For the threshold of a batch
    that is spread over several processes, gather entropy and mask of all of them, outside a
    compiled region.

    Args:
        entropy: of any shape, floating point.
        mask: of the same shape: a token is kept where the mask is not zero.
        top_entropy_quantile: in [0, 1]; 0 gives the largest entropy.

    Returns:
        A scalar without gradient: float64 for float64 entropy, else float32.

    Raises:
        TypeError: entropy is not a floating-point tensor, mask is not a tensor, or
            top_entropy_quantile is not a number.
        ValueError: mask does not have entropy's shape, or top_entropy_quantile is not in [0, 1].

    Source: arXiv:2506.01939.
    """
    check_values("entropy_threshold", "entropy", entropy, of_any_shape=True)
    check_mask("entropy_threshold", "mask", mask, entropy, name_of_like="entropy")
    share = top_entropy_quantile
    check_number("entropy_threshold", "top_entropy_quantile", share, at_least=0, at_most=1)
    return quantile(widened(entropy.detach()), mask != 0, 1 - share)


def quantile(values: Tensor, mask: Tensor, share: float) -> Tensor:
    """Return the quantile of the values where the mask is True.

    No size depends on the mask, which the host would have to read for that.
    """
    count = mask.sum()
    # An inf is appended, so that there is a first value even if there are no values.
    values = torch.cat(
        [values.masked_fill(~mask, torch.inf).flatten(), values.new_full((1,), torch.inf)]
    )
    ordered = values.sort().values
    rank = share * (count - 1).clamp(min=0).to(values.dtype)
    below = rank.floor().long()
    # The values behind the last kept one are inf.
    above = torch.minimum(below + 1, (count - 1).clamp(min=0))
    low, high = ordered.index_select(0, torch.stack([below, above])).unbind()
    return torch.where(high == low, low, low + (rank - below) * (high - low))
