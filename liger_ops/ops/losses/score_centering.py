"""The policy loss whose score is centred under the policy that sampled, for each token.

It is a sum of the log-probabilities of the sampled word and of the words that the sampler lists,
with coefficients that have no gradient: those are the gradient of the loss.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

# The least probability of the words that are not listed, of either policy. It is a difference of 1
# and the listed probabilities in float32.
LEAST_TAIL = 1e-6

# importance_sampling -> the weight of a ratio p / q within bounds, or None for a weight of 1.
WEIGHTS: dict[str, Callable[[Tensor, float, float], Tensor] | None] = {
    "none": None,
    "truncate": lambda ratio, low, high: ratio.clamp(low, high),
    "mask": lambda ratio, low, high: torch.where((ratio >= low) & (ratio <= high), ratio, 0.0),
}


class SampledTokens(NamedTuple):
    """The values from which each token's loss is computed, but for the policy's log-probabilities.

    Where a token is dropped, or an entry is left out, each number is 0. Those of tokens have a last
    dimension of size 1.
    """

    advantages: Tensor
    # (..., K) of the listed words: which entries count, the sampler's log-probabilities, and the
    # probabilities.
    listed: Tensor
    log_q: Tensor
    q: Tensor
    q_tail: Tensor
    # Of the sampled word; None if the weights are 1.
    sampling_log_prob: Tensor | None
    importance: tuple[str, float, float]

    @staticmethod
    def of(
        kept: Tensor, listed: Tensor, dtype: torch.dtype, sampling_top_log_prob: Tensor,
        advantages: Tensor, sampling_log_prob: Tensor | None, importance: tuple[str, float, float],
    ) -> SampledTokens:  # fmt: skip
        """Return the values of tokens in dtype.

        kept, (...), says which tokens count, and listed, (..., K), which entries. importance is the
        loss's importance_sampling with its bounds.
        """

        def of_tokens(values: Tensor) -> Tensor:
            return torch.where(kept, values.detach().to(dtype), 0.0).unsqueeze(-1)

        log_q = torch.where(listed, sampling_top_log_prob.detach().to(dtype), 0.0)
        q, sampled = torch.where(listed, log_q.exp(), 0.0), None
        if WEIGHTS[importance[0]] is not None:
            assert sampling_log_prob is not None
            sampled = of_tokens(sampling_log_prob)
        return SampledTokens(of_tokens(advantages), listed, log_q, q, _tail(q), sampled, importance)

    def chunk(self, tokens: slice) -> SampledTokens:
        """Return the values of some tokens, where these have one dimension."""
        return SampledTokens._make(x[tokens] if isinstance(x, Tensor) else x for x in self)

    def coefficients(self, log_prob: Tensor) -> Tensor:
        """Return the gradient of each token's loss with respect to log_prob, (..., K + 1).

        These are the policy's log-probabilities of the sampled and of the listed words, 0 where one
        does not count. The gradient is a constant to autograd.
        """
        log_p = log_prob.detach()
        kind, *bounds = self.importance
        weigh = WEIGHTS[kind]
        sampled, top = log_p[..., :1], log_p[..., 1:]
        p = torch.where(self.listed, top.exp(), 0.0)
        p_tail, q = _tail(p), self.q
        rho = self.q_tail / p_tail
        weight = None
        if weigh is not None:
            assert self.sampling_log_prob is not None
            weight = weigh((sampled - self.sampling_log_prob).exp(), *bounds)
            q = q * weigh((top - self.log_q).exp(), *bounds)
            rho = rho * weigh(p_tail / self.q_tail, *bounds)
        centre = q - rho * p
        if weight is None:
            return self.advantages * torch.nn.functional.pad(centre, (1, 0), value=-1.0)
        return self.advantages * torch.cat([-weight, centre], -1)


def losses_of(coefficients: Tensor, log_prob: Tensor) -> Tensor:
    """Return the loss of each token."""
    return (coefficients * log_prob).sum(-1)


def _tail(probabilities: Tensor) -> Tensor:
    return (1 - probabilities.sum(-1, keepdim=True)).clamp(min=LEAST_TAIL)
