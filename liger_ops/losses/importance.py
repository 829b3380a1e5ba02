"""Importance ratios of policies, and estimates of their divergence."""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops.precision import widened
from .checks import check_number, check_per_sequence, check_values
from .sequences import check_batch, kept, token_counts


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
