"""A policy loss whose score is centred under the policy that sampled."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ops.losses.score_centering import WEIGHTS, SampledTokens, losses_of
from ..ops.tensors import widened
from .checks import (
    check_choice,
    check_items,
    check_number,
    check_per_sequence,
    check_tensor,
    check_values,
)
from .grpo import metric
from .policy_terms import Divisors, column, per_item
from .sequences import check_batch, kept


class CenteredOutput(NamedTuple):
    """The output of `score_centering_loss`. Only loss and per_token_loss have a gradient.

    loss is a scalar. per_token_loss, (B, T), is zero where the mask is zero. listed and
    sampling_listed are means over the kept tokens: of the probability that the policy, and the
    policy that sampled, give to the listed words together.
    """

    loss: Tensor
    per_token_loss: Tensor
    listed: Tensor
    sampling_listed: Tensor


def score_centering_loss(
    log_prob: Tensor, top_log_prob: Tensor, sampling_top_log_prob: Tensor, advantages: Tensor,
    mask: Tensor, *, sampling_log_prob: Tensor | None = None,
    num_items_in_batch: Tensor | float | None = None,
    importance_sampling: str = "none", importance_min: float = 0.0, importance_max: float = 2.0,
) -> CenteredOutput:  # fmt: skip
    """Compute REINFORCE with a score of mean zero under the policy that sampled the tokens.

    The sampler, an engine with other numerics or older weights, has the distribution q where the
    policy has p. The gradient of log p, the score, has mean zero under p, but not under q: its mean
    under q, times the mean advantage, pulls the policy towards the sampler. Here that mean is
    subtracted. Of q, the log-probabilities of K words of each token are known; the others, the
    tail, are taken to be distributed as in p. For a token with the sampled word a, the listed words
    H, sg(x) the value of x without gradient, and A the advantage:

        rho = (1 - sum_H q_v) / (1 - sum_H p_v), and q_v = rho p_v for a word of the tail
        w(r) = 1, or clip(r, importance_min, importance_max) for "truncate", or
               r within these bounds and 0 outside for "mask"
        centre = sum_v sg(q_v w(p_v / q_v)) log p_v
               = sum_H sg(q_v w(p_v / q_v) - rho w(1 / rho) p_v) log p_v
        per_token_loss = -A (sg(w(p_a / q_a)) log p_a - centre)
        loss = sum of per_token_loss / num_items_in_batch, or if None / the kept tokens

    The second form of centre has the gradient of the first: the scores of all words, weighted with
    p, sum to zero. Their values differ, so that the loss is no measure of progress. If every word
    is listed, the gradient is that of the exact mean, whatever rho is. Each of the two tails is at
    least 1e-6. A word that is listed must not be listed again for the same token.

    `liger_ops.linear_log_prob` computes log_prob and top_log_prob in one call, with the sampled
    word and the K words as the targets of a token; `LinearScoreCenteringLoss` calls it so.
    `liger_ops.linear_top_k` gives the words and log-probabilities of a sampler whose weights are at
    hand.

    Args:
        log_prob: (B, T), floating point: log p of each sampled word.
        top_log_prob: (B, T, K), floating point: log p of the words that the sampler lists.
        sampling_top_log_prob: (B, T, K), without gradient: log q of these words, of the whole
            vocabulary. An entry of -inf is left out, which pads shorter lists.
        advantages: (B,), (B, 1) or (B, T), without gradient.
        mask: (B, T): a token is kept where the mask is not zero. The values of the other arguments
            at other tokens have no effect, even NaN and inf.
        sampling_log_prob: (B, T), without gradient: log q of each sampled word; needed if
            importance_sampling is not "none".
        num_items_in_batch: as for `grpo_loss`.
        importance_sampling: none, truncate or mask.
        importance_min, importance_max: the bounds of p / q, at least 0.

    Returns:
        CenteredOutput, computed in float64 for float64 log_prob, else in float32.

    Raises:
        TypeError: a tensor of log-probabilities is not a floating-point tensor, an option is not of
            its type, or sampling_log_prob is None although importance_sampling is not "none".
        ValueError: a shape is not one of those above, or an option is outside its range.

    Source: Marek and Ryabinin, "Score Centering Stabilizes Off-policy Reinforcement Learning",
        arXiv:2609.20807.

    Example:
        >>> log_prob, mask = torch.full((1, 2), 0.5).log(), torch.ones(1, 2)
        >>> top, sampled = (torch.full((1, 2, 1), p).log() for p in (0.5, 0.75))
        >>> advantages = torch.ones(1)
        >>> liger_ops.losses.score_centering_loss(log_prob, top, sampled, advantages, mask).loss
        tensor(0.3466)
    """
    name = "score_centering_loss"
    check_batch(name, log_prob, mask)
    for argument, value in (
        ("top_log_prob", top_log_prob), ("sampling_top_log_prob", sampling_top_log_prob)
    ):  # fmt: skip
        check_listed(name, argument, value, log_prob)
    if sampling_top_log_prob.shape != top_log_prob.shape:
        text = f"{name}: sampling_top_log_prob must be of top_log_prob's shape, got "
        raise ValueError(
            f"{text}{tuple(sampling_top_log_prob.shape)} for {tuple(top_log_prob.shape)}"
        )
    check_per_sequence(name, "advantages", advantages, log_prob)
    check_items(name, num_items_in_batch)
    check_choice(name, "importance_sampling", importance_sampling, WEIGHTS)
    check_number(name, "importance_min", importance_min, at_least=0)
    check_number(name, "importance_max", importance_max, at_least=importance_min)
    if sampling_log_prob is not None:
        check_values(name, "sampling_log_prob", sampling_log_prob, like=log_prob)
    elif importance_sampling != "none":
        raise TypeError(
            f"{name}: sampling_log_prob must be a tensor if importance_sampling is not 'none', got"
            " None"
        )
    mask = mask != 0
    sampled = widened(log_prob).unsqueeze(-1)
    listed = mask.unsqueeze(-1) & (sampling_top_log_prob != -torch.inf)
    counts = torch.cat([mask.unsqueeze(-1), listed], -1)
    values = kept(torch.cat([sampled, top_log_prob.to(sampled.dtype)], -1), counts)
    importance = (importance_sampling, importance_min, importance_max)
    tokens = SampledTokens.of(
        mask, listed, values.dtype, sampling_top_log_prob, column(advantages).expand_as(log_prob),
        sampling_log_prob, importance,
    )  # fmt: skip
    losses = losses_of(tokens.coefficients(values), values)
    loss = per_item(losses, Divisors(mask, None, num_items_in_batch))
    p = kept(values[..., 1:].detach().exp(), listed)
    masses = [metric(x.sum(-1), mask) for x in (p, tokens.q)]
    assert masses[0] is not None and masses[1] is not None
    return CenteredOutput(loss, losses, masses[0], masses[1])


def check_listed(
    function: str, name: str, value: Any, tokens: Tensor, name_of_tokens: str = "log_prob"
) -> None:
    """Raise unless value is a floating-point tensor of shape (B, T, K)."""
    check_tensor(function, name, value)
    check_values(function, name, value, of_any_shape=True)
    if value.dim() != 3 or value.shape[:2] != tokens.shape:
        text = f"{function}: {name} must be of shape (B, T, K) for {name_of_tokens}'s (B, T), got "
        raise ValueError(f"{text}{tuple(value.shape)} for {tuple(tokens.shape)}")
