"""Losses of single responses that are labelled good or bad: KTO and the unpaired APO."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .checks import check_choice, check_number, check_per_sequence, check_tensor
from .outputs import UnpairedPreferenceOutput
from .sequences import batch_mean, check_batch, reference_values, sequence_values

LOSS_TYPES = ("kto", "apo_zero_unpaired")


def kto_loss(
    log_prob: Tensor, mask: Tensor, preference_labels: Tensor, ref_log_prob: Tensor | None = None,
    kl: Tensor | None = None, *, beta: float = 0.1, loss_type: str = "kto",
    desirable_weight: float = 1.0, undesirable_weight: float = 1.0, average_log_prob: bool = False,
) -> UnpairedPreferenceOutput:  # fmt: skip
    """Compute a loss of single responses that are labelled desirable or undesirable.

        r = log pi(y|x) - log pi_ref(y|x)
        kto                loss_y = 1 - s(beta (r - kl)) if desirable, else 1 - s(beta (kl - r))
        apo_zero_unpaired  loss_y = 1 - s(beta r)        if desirable, else s(beta r)
        loss = the mean over the batch of the label's weight times loss_y

    A response without a kept token gives zero. It still counts in the mean.

    Args:
        log_prob, mask: (B, T), as for `sequence_log_prob`.
        preference_labels: (B,): a response is desirable where the label is not zero.
        ref_log_prob: as for `dpo_loss`; if None, r is the policy's log-probability.
        kl: the reference point z_0 of kto, without gradient: a tensor of one number, or (B,). It is
            used unchanged; see `kto_kl`. It must be None for apo_zero_unpaired, which is kto with a
            reference point of zero.
        beta: above 0.
        loss_type: kto or apo_zero_unpaired.
        desirable_weight, undesirable_weight: the weight of each label, lambda in the paper.
        average_log_prob: take means over tokens instead of sums.

    Returns:
        UnpairedPreferenceOutput, computed in float64 for float64 log_prob, else in float32.

    Raises:
        TypeError: log_prob or ref_log_prob is not a floating-point tensor, an option is not of its
            type, or kl is None for kto.
        ValueError: log_prob is not (B, T), mask or ref_log_prob does not have its shape,
            preference_labels or kl is not (B,), beta is not above 0, a weight is negative,
            loss_type is unknown, or kl is given for apo_zero_unpaired.

    Source: KTO, arXiv:2402.01306, eq. 7; APO, arXiv:2408.06266, eq. 7, without pairs.

    Example:
        >>> log_prob, labels = torch.zeros(2, 3), torch.tensor([True, False])
        >>> kl = torch.tensor(0.0)
        >>> liger_ops.losses.kto_loss(log_prob, torch.ones(2, 3), labels, kl=kl).loss
        tensor(0.5000)
    """
    check_batch("kto_loss", log_prob, mask)
    check_per_sequence(
        "kto_loss", "preference_labels", preference_labels, log_prob, of_tokens=False
    )
    check_choice("kto_loss", "loss_type", loss_type, LOSS_TYPES)
    check_number("kto_loss", "beta", beta, above=0)
    check_number("kto_loss", "desirable_weight", desirable_weight, at_least=0)
    check_number("kto_loss", "undesirable_weight", undesirable_weight, at_least=0)
    mask = mask != 0
    policy = sequence_values("kto_loss", log_prob, mask, average_log_prob)
    ref = reference_values("kto_loss", log_prob, mask, ref_log_prob, policy, average_log_prob)
    logratio = policy.log_prob - ref
    point = reference_point(loss_type, kl, log_prob, logratio)
    is_desirable = preference_labels != 0
    gain = beta * torch.where(is_desirable, logratio - point, point - logratio)
    weight = torch.full_like(gain, undesirable_weight).masked_fill(is_desirable, desirable_weight)
    losses = (weight * torch.sigmoid(-gain)).masked_fill(policy.tokens == 0, 0.0)
    return UnpairedPreferenceOutput(
        batch_mean(losses), policy.log_prob.detach(), beta * logratio.detach()
    )


def reference_point(loss_type: str, kl: Any, log_prob: Tensor, logratio: Tensor) -> Tensor:
    if loss_type != "kto":
        if kl is not None:
            raise ValueError(
                f"kto_loss: kl must be None for the loss type {loss_type}, got {type(kl).__name__}"
            )
        return torch.zeros_like(logratio)
    if kl is None:
        raise TypeError(
            "kto_loss: kl must be a tensor for the loss type kto (see kto_kl; without a reference"
            " point it is apo_zero_unpaired), got None"
        )
    check_tensor("kto_loss", "kl", kl)
    if kl.numel() != 1:
        check_per_sequence("kto_loss", "kl", kl, log_prob, of_tokens=False)
    return kl.detach().to(logratio.dtype).reshape(-1).expand_as(logratio)


def kto_kl(log_prob: Tensor, mask: Tensor, ref_log_prob: Tensor) -> Tensor:
    """Compute the reference point of `kto_loss`, from responses to other prompts of the batch.

        z_0 = max(0, mean over the batch of log pi(y'|x) - log pi_ref(y'|x))

    With several processes, z_0 is the maximum of 0 and the mean over all of them. The caller takes
    that mean, outside a compiled region.

    Args:
        log_prob, mask: (B, T), as for `sequence_log_prob`, where y' in row i is a response to
            another prompt than x.
        ref_log_prob: as for `dpo_loss`, but not None.

    Returns:
        A scalar without gradient: float64 for float64 log_prob, else float32.

    Raises:
        TypeError: log_prob or ref_log_prob is not a floating-point tensor, or mask is not a tensor.
        ValueError: log_prob is not (B, T), or mask or ref_log_prob does not have its shape.

    Source: arXiv:2402.01306.
    """
    check_batch("kto_kl", log_prob, mask)
    check_tensor("kto_kl", "ref_log_prob", ref_log_prob)
    mask = mask != 0
    policy = sequence_values("kto_kl", log_prob.detach(), mask, False)
    ref = reference_values("kto_kl", log_prob, mask, ref_log_prob, policy, False)
    return batch_mean((policy.log_prob - ref).masked_fill(policy.tokens == 0, 0.0)).clamp(min=0)
