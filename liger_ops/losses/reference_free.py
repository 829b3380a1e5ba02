"""Losses of preference pairs without a reference: ORPO, CPO and SimPO."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from .checks import check_choice, check_mask, check_number, check_values
from .outputs import PreferenceOutput
from .pair_losses import smoothed
from .sequences import batch_mean, check_pairs, halves, nll, sequence_values


def orpo_loss(
    log_prob: Tensor, mask: Tensor, *, beta: float = 0.1, alpha: float = 1.0,
    nll_mask: Tensor | None = None, nll_log_prob: Tensor | None = None,
) -> PreferenceOutput:  # fmt: skip
    """Compute the odds ratio loss of preference pairs, plus the loss of the chosen tokens.

        P = exp(mean of log_prob over a response's tokens),  odds = P / (1 - P)
        loss = alpha * nll - beta * mean over the pairs of log s(log(odds_w / odds_l))

    nll is the mean of -log_prob over the tokens of the chosen responses in nll_mask. A pair with a
    response without kept tokens has no odds: it gives zero, and still counts in the mean.

    Args:
        log_prob, mask: as for `dpo_loss`.
        beta: the weight of the odds ratio, lambda in the paper; above 0.
        alpha: the weight of nll; 0 leaves it out.
        nll_mask: (2B, T), whose first half says which tokens are in nll; mask if None. The authors'
            code takes the prompt's tokens too.
        nll_log_prob: (2B, T), whose first half is used in nll; log_prob if None. It is for an nll
            of other tokens than those of the responses.

    Returns:
        PreferenceOutput, with means of log-probabilities; the rewards are beta times these, and
        log_odds is log(odds_w / odds_l). Computed in float64 for float64 log_prob, else in float32.

    Raises:
        TypeError: log_prob or nll_log_prob is not a floating-point tensor, a mask is not a tensor,
            or beta or alpha is not a number.
        ValueError: log_prob is not (2B, T), another tensor does not have its shape, or beta is not
            above 0.

    Source: arXiv:2403.07691, eqs. 4 and 7.

    Example:
        >>> log_prob = torch.tensor([[-0.5, -0.7], [-1.0, -2.0]])
        >>> liger_ops.losses.orpo_loss(log_prob, torch.ones(2, 2)).loss
        tensor(0.6212)
    """

    def losses(chosen: Tensor, rejected: Tensor) -> Tensor:
        return -beta * logsigmoid(log_odds_ratio(chosen, rejected))

    output = pair_loss(
        "orpo_loss", log_prob, mask, losses, beta, alpha, nll_mask, nll_log_prob,
        average=True, needs_both=True,
    )  # fmt: skip
    has_odds = torch.stack(halves((mask != 0).any(-1))).all(0)
    log_odds = log_odds_ratio(output.chosen_log_prob, output.rejected_log_prob)
    return PreferenceOutput(*output[:-1], log_odds.masked_fill(~has_odds, 0.0))


def cpo_loss(
    log_prob: Tensor, mask: Tensor, *, beta: float = 0.1, alpha: float = 1.0,
    loss_type: str = "sigmoid", label_smoothing: float = 0.0, average_log_prob: bool = False,
    nll_mask: Tensor | None = None, nll_log_prob: Tensor | None = None,
) -> PreferenceOutput:  # fmt: skip
    """Compute the contrastive loss of preference pairs, plus the loss of the chosen tokens.

        d = log pi(y_w|x) - log pi(y_l|x)
        loss = alpha * nll + the mean over the pairs of
            sigmoid:  -(1 - e) log s(beta d) - e log s(-beta d)
            hinge:    max(0, 1 - beta d)
            ipo:      (d - 1 / (2 beta))^2, with means over tokens

    The paper's nll is a sum over a response's tokens. Its authors' code, TRL, Liger-Kernel and this
    function take the mean over all tokens of the batch. A pair without any kept token gives zero,
    and still counts in the mean.

    Args:
        log_prob, mask, average_log_prob: as for `dpo_loss`.
        beta: above 0.
        alpha, nll_mask, nll_log_prob: as for `orpo_loss`.
        loss_type: sigmoid, hinge or ipo.
        label_smoothing: e, in [0, 1); 0 for hinge and ipo.

    Returns:
        PreferenceOutput; the rewards are beta times the log-probabilities. Computed in float64 for
        float64 log_prob, else in float32.

    Raises:
        TypeError: log_prob or nll_log_prob is not a floating-point tensor, a mask is not a tensor,
            or an option is not of its type.
        ValueError: log_prob is not (2B, T), another tensor does not have its shape, beta is not
            above 0, loss_type is unknown, label_smoothing is not in [0, 1), or it is not 0 for
            hinge or ipo.

    Source: arXiv:2401.08417, eq. 3, and its authors' code, fe1ixxu/ALMA.

    Example:
        >>> log_prob = torch.tensor([[-0.5, -0.7], [-1.0, -2.0]])
        >>> liger_ops.losses.cpo_loss(log_prob, torch.ones(2, 2)).loss
        tensor(1.2072)
    """
    check_choice("cpo_loss", "loss_type", loss_type, CPO_LOSSES)
    check_number("cpo_loss", "label_smoothing", label_smoothing, at_least=0, below=1)
    if loss_type != "sigmoid" and label_smoothing != 0:
        raise ValueError(
            "cpo_loss: label_smoothing must be 0 for hinge and ipo, got"
            f" {label_smoothing} for {loss_type}"
        )
    function = CPO_LOSSES[loss_type]

    def losses(chosen: Tensor, rejected: Tensor) -> Tensor:
        return function(chosen - rejected, beta, label_smoothing)

    average = average_log_prob or loss_type == "ipo"
    return pair_loss(
        "cpo_loss", log_prob, mask, losses, beta, alpha, nll_mask, nll_log_prob, average=average
    )


def simpo_loss(
    log_prob: Tensor, mask: Tensor, *, beta: float = 0.1, gamma: float = 0.5, alpha: float = 0.0,
    label_smoothing: float = 0.0, nll_mask: Tensor | None = None,
    nll_log_prob: Tensor | None = None,
) -> PreferenceOutput:  # fmt: skip
    """Compute a loss of preference pairs from means over tokens, with a target margin.

        z = beta * (mean log_prob of the chosen - mean log_prob of the rejected) - gamma
        loss = alpha * nll + the mean over the pairs of -(1 - e) log s(z) - e log s(-z)

    A pair without any kept token gives zero, and still counts in the mean.

    Args:
        log_prob, mask: as for `dpo_loss`.
        beta: above 0. The paper's models were trained with 2 and 2.5; 0.1 is the default of TRL and
            Liger-Kernel.
        gamma: the target margin of the rewards.
        alpha, nll_mask, nll_log_prob: as for `orpo_loss`. The paper has no nll; TRL and
            Liger-Kernel add it by default, with weight 1.
        label_smoothing: e, in [0, 1).

    Returns:
        PreferenceOutput, with means of log-probabilities; the rewards are beta times these.
        Computed in float64 for float64 log_prob, else in float32.

    Raises:
        TypeError: log_prob or nll_log_prob is not a floating-point tensor, a mask is not a tensor,
            or an option is not a number.
        ValueError: log_prob is not (2B, T), another tensor does not have its shape, beta is not
            above 0, or label_smoothing is not in [0, 1).

    Source: arXiv:2405.14734.

    Example:
        >>> log_prob = torch.tensor([[-0.5, -0.7], [-1.0, -2.0]])
        >>> liger_ops.losses.simpo_loss(log_prob, torch.ones(2, 2)).loss
        tensor(0.9190)
    """
    check_number("simpo_loss", "gamma", gamma)
    check_number("simpo_loss", "label_smoothing", label_smoothing, at_least=0, below=1)

    def losses(chosen: Tensor, rejected: Tensor) -> Tensor:
        return smoothed(beta * (chosen - rejected) - gamma, label_smoothing)

    return pair_loss(
        "simpo_loss", log_prob, mask, losses, beta, alpha, nll_mask, nll_log_prob, average=True
    )


def pair_loss(
    function: str, log_prob: Tensor, mask: Tensor, losses: Callable[[Tensor, Tensor], Tensor],
    beta: float, alpha: float, nll_mask: Any, nll_log_prob: Any, *,
    average: bool, needs_both: bool = False,
) -> PreferenceOutput:  # fmt: skip
    """Compute the mean of losses(chosen, rejected) over the pairs, plus alpha times nll.

    A pair gives zero if neither response has a kept token or, with needs_both, if one of them has
    none.
    """
    check_pairs(function, log_prob, mask)
    check_number(function, "beta", beta, above=0)
    check_number(function, "alpha", alpha)
    mask = mask != 0
    if nll_mask is None:
        nll_mask = mask
    else:
        check_mask(function, "nll_mask", nll_mask, log_prob)
        nll_mask = nll_mask != 0
    if nll_log_prob is None:
        nll_log_prob = log_prob
    else:
        check_values(function, "nll_log_prob", nll_log_prob, like=log_prob)
    sequences = sequence_values(function, log_prob, mask, average)
    chosen, rejected = halves(sequences.log_prob)
    counts = torch.stack(halves(sequences.tokens))
    present = (counts > 0).all(0) if needs_both else (counts > 0).any(0)
    loss = batch_mean(losses(chosen, rejected).masked_fill(~present, 0.0))
    nll_loss = nll(halves(nll_log_prob)[0], halves(nll_mask)[0], chosen.dtype)
    if alpha != 0:
        loss = loss + alpha * nll_loss
    chosen, rejected = chosen.detach(), rejected.detach()
    return PreferenceOutput(
        loss, chosen, rejected, beta * chosen, beta * rejected, nll_loss.detach()
    )


def log_odds_ratio(chosen: Tensor, rejected: Tensor) -> Tensor:
    return (chosen - log1mexp(chosen)) - (rejected - log1mexp(rejected))


def log1mexp(x: Tensor) -> Tensor:
    """Return log(1 - exp(x)) for x <= 0 without cancellation; log(tiny) for x = 0."""
    x = x.clamp(max=-torch.finfo(x.dtype).tiny)
    near = x > -math.log(2)
    # Each branch gets -1 where the other is taken, so that its gradient there is not NaN.
    of_near = torch.log(-torch.expm1(torch.where(near, x, -1.0)))
    return torch.where(near, of_near, torch.log1p(-torch.exp(torch.where(near, -1.0, x))))


# Functions of the difference d, beta and label_smoothing.
CPO_LOSSES: dict[str, Callable[[Tensor, float, float], Tensor]] = {
    "sigmoid": lambda d, beta, smoothing: smoothed(beta * d, smoothing),
    "hinge": lambda d, beta, smoothing: torch.relu(1 - beta * d),
    "ipo": lambda d, beta, smoothing: (d - 1 / (2 * beta)) ** 2,
}
