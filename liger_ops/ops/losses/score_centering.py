"""The policy loss whose score is centred under the policy that sampled, for each token.

It is a sum of the log-probabilities of the sampled word and of the words that the sampler lists,
with coefficients that have no gradient: those are the gradient of the loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

# The least probability of the words that are not listed, of either policy. It is a difference of 1
# and the listed probabilities in float32.
LEAST_TAIL = 1e-6


def _mask(p: Tensor, low: Any, high: Any) -> Tensor:
    is_within = p >= low
    if high is not None:
        is_within = is_within & (p <= high)
    return torch.where(is_within, p, 0.0)


# importance_sampling -> q w(p / q) of p and the bounds q low and q high, the second None for an
# infinite one; or None for a weight of 1. A ratio of its own would be infinite where q vanishes.
WEIGHTS: dict[str, Callable[[Tensor, Any, Any], Tensor] | None] = {
    "none": None,
    "truncate": lambda p, low, high: p.clamp(min=low, max=high),
    "mask": _mask,
}


class SampledTokens(NamedTuple):
    """The values from which each token's loss is computed, but for the policy's log-probabilities.

    Where a token is dropped, or an entry is left out, each number is 0. Those of tokens have a last
    dimension of size 1.
    """

    advantages: Tensor
    # (..., K) of the listed words: which entries count, and the sampler's probabilities.
    listed: Tensor
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
        return SampledTokens(of_tokens(advantages), listed, q, _tail(q), sampled, importance)

    def chunk(self, tokens: slice) -> SampledTokens:
        """Return the values of some tokens, where these have one dimension."""
        return SampledTokens._make(x[tokens] if isinstance(x, Tensor) else x for x in self)

    def coefficients(self, log_prob: Tensor) -> Tensor:
        """Return the gradient of each token's loss with respect to log_prob, (..., K + 1).

        These are the policy's log-probabilities of the sampled and of the listed words, 0 where one
        does not count. The gradient is a constant to autograd.
        """
        log_p = log_prob.detach()
        weigh = WEIGHTS[self.importance[0]]
        sampled, top = log_p[..., :1], log_p[..., 1:]
        p = torch.where(self.listed, top.exp(), 0.0)
        p_tail, q = _tail(p), self.q
        rho = self.q_tail / p_tail
        weight = None
        if weigh is not None:
            assert self.sampling_log_prob is not None
            weight = weigh((sampled - self.sampling_log_prob).exp(), *self._bounds(1.0))
            rho = weigh(p_tail, *self._bounds(self.q_tail)) / p_tail
            q = weigh(p, *self._bounds(q))
        centre = q - rho * p
        if weight is None:
            return self.advantages * torch.nn.functional.pad(centre, (1, 0), value=-1.0)
        return self.advantages * torch.cat([-weight, centre], -1)

    def _bounds(self, q: Any) -> tuple[Any, Any]:
        """Return the bounds of p whose ratio to q is within those of the weights."""
        _, low, high = self.importance
        return q * low, None if high == math.inf else q * high


def losses_of(coefficients: Tensor, log_prob: Tensor) -> Tensor:
    """Return the loss of each token."""
    return (coefficients * log_prob).sum(-1)


def _tail(probabilities: Tensor) -> Tensor:
    return (1 - probabilities.sum(-1, keepdim=True)).clamp(min=LEAST_TAIL)
