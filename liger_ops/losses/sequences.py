"""Values of sequences from values of their tokens."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ops.tensors import widened
from .checks import check_mask, check_number, check_per_sequence, check_values


class Sequences(NamedTuple):
    """Log-probabilities of sequences, and their numbers of kept tokens, both of shape (B,)."""

    log_prob: Tensor
    tokens: Tensor


def kept(values: Tensor, mask: Tensor) -> Tensor:
    """Return values where the mask is True, and zero elsewhere, even for NaN and inf."""
    return values.masked_fill(~mask, 0.0)


def token_counts(mask: Tensor, dtype: torch.dtype) -> Tensor:
    return mask.sum(-1).to(dtype)


def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the chosen and the rejected half of a batch of pairs."""
    pairs = x.shape[0] // 2
    # narrow gives both halves the size `pairs`. While tracing, the size of a slice to the end would
    # be another symbol.
    return x.narrow(0, 0, pairs), x.narrow(0, pairs, pairs)


def batch_mean(x: Tensor) -> Tensor:
    """Return the mean over a batch; zero for an empty batch."""
    return x.sum() / max(x.shape[0], 1)


def sequence_log_prob(
    log_prob: Tensor, mask: Tensor, *, average_log_prob: bool = False, ld_alpha: float | None = None
) -> Tensor:
    """Compute the log-probability of each sequence from those of its tokens.

        sum over the kept tokens t of w_t log_prob_t

    A reference's values may be computed before the training and stored in this form. Use the same
    options here as in the loss.

    Args:
        log_prob: (B, T), floating point: the log-probability of each token.
        mask: (B, T): a token is kept where the mask is not zero. The values of log_prob at other
            tokens have no effect, even NaN and inf.
        average_log_prob: divide by the number of kept tokens.
        ld_alpha: the weight w_t, in [0, 1], of the tokens by which a response is longer than the
            other response of its pair; all other tokens have weight 1. The first half of the batch
            must be the chosen responses, and the second half the rejected ones.

    Returns:
        (B,), float64 for float64 log_prob, else float32. A sequence without a kept token has 0.

    Raises:
        TypeError: log_prob is not a floating-point tensor, mask is not a tensor, or ld_alpha is not
            a number.
        ValueError: log_prob is not (B, T), or B is odd with ld_alpha; mask does not have its shape;
            or ld_alpha is not in [0, 1].

    Source: LD-DPO, arXiv:2409.06411, for ld_alpha.
    """
    check = check_batch if ld_alpha is None else check_pairs
    check("sequence_log_prob", log_prob, mask)
    return sequence_values(
        "sequence_log_prob", log_prob, mask != 0, average_log_prob, ld_alpha
    ).log_prob


def check_batch(function: str, log_prob: Any, mask: Any) -> None:
    check_values(function, "log_prob", log_prob)
    check_mask(function, "mask", mask, log_prob)


def check_pairs(function: str, log_prob: Any, mask: Any) -> None:
    check_batch(function, log_prob, mask)
    if log_prob.shape[0] % 2 != 0:
        text = f"{function}: log_prob must hold the chosen responses and then as many rejected ones"
        raise ValueError(f"{text}, got an odd batch, of shape {tuple(log_prob.shape)}")


def sequence_values(
    function: str, log_prob: Tensor, mask: Tensor, average: bool, ld_alpha: float | None = None
) -> Sequences:
    """Sum log_prob over the kept tokens of each sequence, or average it."""
    values = kept(widened(log_prob), mask)
    tokens = token_counts(mask, values.dtype)
    if ld_alpha is not None:
        check_number(function, "ld_alpha", ld_alpha, at_least=0, at_most=1)
        values = values * length_weights(tokens, mask, ld_alpha)
    sums = values.sum(-1)
    return Sequences(sums / tokens.clamp(min=1) if average else sums, tokens)


def length_weights(tokens: Tensor, mask: Tensor, ld_alpha: float) -> Tensor:
    """Return 1 for tokens up to the length of the pair's shorter response, else ld_alpha."""
    # Repeated: the shorter length of a pair is for both of its responses.
    shared = torch.minimum(*halves(tokens)).repeat(2)
    weights = torch.full_like(mask, ld_alpha, dtype=tokens.dtype)
    return weights.masked_fill(mask.cumsum(-1) <= shared[:, None], 1.0)


def reference_values(
    function: str, log_prob: Tensor, mask: Tensor, ref_log_prob: Any, policy: Sequences,
    average: bool, ld_alpha: float | None = None,
) -> Tensor:  # fmt: skip
    """Return the reference's log-probability of each sequence, without gradient; zeros for None."""
    if ref_log_prob is None:
        return torch.zeros_like(policy.log_prob)
    if isinstance(ref_log_prob, Tensor) and ref_log_prob.dim() == 1:
        check_per_sequence(function, "ref_log_prob", ref_log_prob, log_prob, of_tokens=False)
        return ref_log_prob.detach().to(policy.log_prob.dtype)
    check_values(function, "ref_log_prob", ref_log_prob, like=log_prob)
    ref = ref_log_prob.detach().to(policy.log_prob.dtype)
    return sequence_values(function, ref, mask, average, ld_alpha).log_prob


def nll(log_prob: Tensor, mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the mean of -log_prob over the kept tokens; zero if there are none."""
    return -kept(log_prob.to(dtype), mask).sum() / mask.sum().clamp(min=1)
