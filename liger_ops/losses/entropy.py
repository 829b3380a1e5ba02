"""Masks and thresholds by the entropy of tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops.precision import widened
from .checks import check_mask, check_number, check_values


def entropy_threshold(entropy: Tensor, mask: Tensor, top_entropy_quantile: float) -> Tensor:
    """The entropy that a share of top_entropy_quantile of the kept tokens reaches.

    It is the quantile 1 - top_entropy_quantile of the kept tokens' entropies, with linear
    interpolation as in `torch.quantile`, and inf if no token is kept. For the threshold of a batch
    that several processes share, gather entropy and mask of all, outside of a compiled region.

    Args:
        entropy: of any shape, floating point.
        mask: of the same shape: a token is kept where the mask is not zero.
        top_entropy_quantile: in [0, 1]; 0 gives the largest entropy.

    Returns:
        A scalar without gradient: float64 for float64 entropy, else float32.

    Raises:
        TypeError, ValueError: for an argument that is not as above, with the argument's name.

    Source: arXiv:2506.01939.
    """
    check_values("entropy_threshold", "entropy", entropy, of_any_shape=True)
    check_mask("entropy_threshold", "mask", mask, entropy, name_of_like="entropy")
    share = top_entropy_quantile
    check_number("entropy_threshold", "top_entropy_quantile", share, at_least=0, at_most=1)
    return quantile(widened(entropy.detach()), mask != 0, 1 - share)


def quantile(values: Tensor, mask: Tensor, share: float) -> Tensor:
    """The quantile of the values where the mask is; no size depends on the mask."""
    count = mask.sum()
    # One value more, so that there is a first one of no values.
    values = torch.cat(
        [values.masked_fill(~mask, torch.inf).flatten(), values.new_full((1,), torch.inf)]
    )
    ordered = values.sort().values
    rank = share * (count - 1).clamp(min=0).to(values.dtype)
    below = rank.floor().long()
    # Beyond the last kept value stands inf.
    above = torch.minimum(below + 1, (count - 1).clamp(min=0))
    low, high = ordered.index_select(0, torch.stack([below, above])).unbind()
    return torch.where(high == low, low, low + (rank - below) * (high - low))
