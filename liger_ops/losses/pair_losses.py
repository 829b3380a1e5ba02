"""The losses of preference pairs among which `dpo_loss` chooses, as functions of log-ratios."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


class Pairs(NamedTuple):
    """The values of B pairs from which a loss is computed, of shape (B,); nll_loss is a scalar.

    A log-ratio is log(pi(y|x) / pi_ref(y|x)). A score is f'(pi / pi_ref), which for the reverse KL
    is the log-ratio. A margin is the chosen minus the rejected log-probability. A length is a
    number of tokens, or 1 if log-probabilities are means. A pair is present if it has a kept token.
    """

    chosen_logratio: Tensor
    rejected_logratio: Tensor
    chosen_score: Tensor
    rejected_score: Tensor
    chosen_length: Tensor
    rejected_length: Tensor
    margin: Tensor
    ref_margin: Tensor
    present: Tensor
    nll_loss: Tensor


class PairOptions(NamedTuple):
    beta: float
    label_smoothing: float
    discopop_tau: float
    reward_shift: Tensor | float


def smoothed(z: Tensor, label_smoothing: float) -> Tensor:
    """Return -log sigma(z) with smoothed labels: flipped with probability label_smoothing."""
    return -(1 - label_smoothing) * logsigmoid(z) - label_smoothing * logsigmoid(-z)


def difference(pairs: Pairs, options: PairOptions) -> Tensor:
    """Return beta times the difference of the scores."""
    return options.beta * (pairs.chosen_score - pairs.rejected_score)


def normalized_difference(pairs: Pairs) -> Tensor:
    """Return the difference of the scores per token, without beta."""
    chosen = pairs.chosen_score / pairs.chosen_length
    return chosen - pairs.rejected_score / pairs.rejected_length


def rewards(pairs: Pairs, options: PairOptions) -> tuple[Tensor, Tensor]:
    return options.beta * pairs.chosen_logratio, options.beta * pairs.rejected_logratio


def sigmoid(pairs: Pairs, options: PairOptions) -> Tensor:
    return smoothed(difference(pairs, options), options.label_smoothing)


def sigmoid_norm(pairs: Pairs, options: PairOptions) -> Tensor:
    return smoothed(options.beta * normalized_difference(pairs), options.label_smoothing)


def hinge(pairs: Pairs, options: PairOptions) -> Tensor:
    return torch.relu(1 - difference(pairs, options))


def ipo(pairs: Pairs, options: PairOptions) -> Tensor:
    return (normalized_difference(pairs) - 1 / (2 * options.beta)) ** 2


def exo_pair(pairs: Pairs, options: PairOptions) -> Tensor:
    """Return the KL divergence of the model's preference from the labels', 1 - eps and eps."""
    z = difference(pairs, options)
    chosen = torch.sigmoid(z) * (logsigmoid(z) - math.log1p(-options.label_smoothing))
    return chosen + torch.sigmoid(-z) * (logsigmoid(-z) - math.log(options.label_smoothing))


def robust(pairs: Pairs, options: PairOptions) -> Tensor:
    z, flipped = difference(pairs, options), options.label_smoothing
    return (flipped * logsigmoid(-z) - (1 - flipped) * logsigmoid(z)) / (1 - 2 * flipped)


def nca_pair(pairs: Pairs, options: PairOptions) -> Tensor:
    chosen, rejected = rewards(pairs, options)
    return -logsigmoid(chosen) - (logsigmoid(-chosen) + logsigmoid(-rejected)) / 2


def bco_pair(pairs: Pairs, options: PairOptions) -> Tensor:
    chosen, rejected = rewards(pairs, options)
    shift = options.reward_shift
    return -logsigmoid(chosen - shift) - logsigmoid(shift - rejected)


def sppo_hard(pairs: Pairs, options: PairOptions) -> Tensor:
    target = 0.5 / options.beta
    return (pairs.chosen_logratio - target) ** 2 + (pairs.rejected_logratio + target) ** 2


def sorted_difference(high: Tensor, low: Tensor, pairs: Pairs, options: PairOptions) -> Tensor:
    """Return the losses of the differences of sorted values; absent pairs come last and give 0."""
    last = torch.finfo(high.dtype).max
    ordered = [x.masked_fill(~pairs.present, last).sort().values for x in (high, low)]
    rank = torch.arange(high.shape[0], device=high.device)
    z = (ordered[0] - ordered[1]).masked_fill(rank >= pairs.present.sum(), 0.0)
    losses = smoothed(options.beta * z, options.label_smoothing)
    return losses.masked_fill(rank >= pairs.present.sum(), 0.0)


def aot(pairs: Pairs, options: PairOptions) -> Tensor:
    return sorted_difference(pairs.margin, pairs.ref_margin, pairs, options)


def aot_unpaired(pairs: Pairs, options: PairOptions) -> Tensor:
    return sorted_difference(pairs.chosen_logratio, pairs.rejected_logratio, pairs, options)


def apo_zero(pairs: Pairs, options: PairOptions) -> Tensor:
    chosen, rejected = rewards(pairs, options)
    return torch.sigmoid(-chosen) + torch.sigmoid(rejected)


def apo_down(pairs: Pairs, options: PairOptions) -> Tensor:
    chosen, rejected = rewards(pairs, options)
    return torch.sigmoid(chosen) + torch.sigmoid(rejected - chosen)


def discopop(pairs: Pairs, options: PairOptions) -> Tensor:
    z = difference(pairs, options)
    ratio = z / options.discopop_tau
    # One exponential of the product: its factors underflow and overflow apart.
    exponential = torch.exp(logsigmoid(ratio) - z)
    return exponential - torch.sigmoid(-ratio) * logsigmoid(z)


def sft(pairs: Pairs, options: PairOptions) -> Tensor:
    """Return a mean over the batch's tokens, of shape (): there is no value for each pair."""
    return pairs.nll_loss


PAIR_LOSSES: dict[str, Callable[[Pairs, PairOptions], Tensor]] = {
    loss.__name__: loss
    for loss in (
        sigmoid, hinge, ipo, exo_pair, nca_pair, robust, bco_pair, sppo_hard, aot, aot_unpaired,
        apo_zero, apo_down, discopop, sft, sigmoid_norm,
    )
}  # fmt: skip
SORTED = {"aot", "aot_unpaired"}
SMOOTHED = {"sigmoid", "sigmoid_norm", "exo_pair", "robust", *SORTED}
# The partition function of an f-divergence cancels in the difference of the two scores alone.
OF_DIFFERENCES = {
    "sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "robust", "discopop", "sft"
}  # fmt: skip
