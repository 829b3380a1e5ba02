"""Thresholds of the entropy of tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops.precision import widened
from .checks import check_mask, check_number, check_values


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
