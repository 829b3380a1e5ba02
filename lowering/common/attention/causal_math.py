"""Arithmetic of multi_token_attention's kernels, for every device: p, and the gradient of scores.

Query i has the scores of keys 0 to i. The others are not loaded, and count as -inf, for which p is
0. In a row with NaN all of p is NaN, as PyTorch's softmax of a masked row is.
"""

import triton
import triton.language as tl

from ..softmax.sparsemax_math import above, below_maximum, sparsemax_gradient


@triton.jit
def probability(x, maximum, total, SPARSE: tl.constexpr):
    """Compute p. `total` is the sum of a row's exponentials or, if SPARSE, the threshold of its
    sparsemax. `maximum` is finite, unless SPARSE."""
    if SPARSE:
        return above(below_maximum(x, maximum), total)
    else:
        return tl.exp(x - maximum) / total


@triton.jit
def score_gradient(dp, p, mean, SPARSE: tl.constexpr):
    """Compute the gradient of scores. `mean` is the sum of p * dp or, if SPARSE, the mean of dp
    over the support."""
    if SPARSE:
        return sparsemax_gradient(dp, p, mean)
    else:
        return p * (dp - mean)
