"""The outputs of the losses of preferences. Only `loss` has a gradient."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class PreferenceOutput(NamedTuple):
    """The output of a loss of B pairs.

    loss is a scalar. The log-probabilities and the rewards, beta times the log-ratio to the
    reference, have shape (B,). nll_loss, a scalar, is the mean of -log_prob over the tokens of the
    chosen responses, or over those of nll_mask. log_odds, of `orpo_loss` alone, is log(odds_w /
    odds_l) of shape (B,), zero for a pair that has no odds.
    """

    loss: Tensor
    chosen_log_prob: Tensor
    rejected_log_prob: Tensor
    chosen_rewards: Tensor
    rejected_rewards: Tensor
    nll_loss: Tensor
    log_odds: Tensor | None = None


class UnpairedPreferenceOutput(NamedTuple):
    """The output of a loss of B single responses.

    loss is a scalar. log_prob and rewards, beta times the log-ratio to the reference, have shape
    (B,).
    """

    loss: Tensor
    log_prob: Tensor
    rewards: Tensor
