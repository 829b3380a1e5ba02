"""Arithmetic of the losses that the kernels of every device share.

Options that are not used are None, and kernels are compiled without them. Names are those of
`liger_ops.cross_entropy`: x is the scaled and capped logits, p their softmax.
"""

import triton
import triton.language as tl

from ..triton_math import VANISHING, soft_cap_slope, soft_capped


@triton.jit
def effective(logits, logit_scale, softcap):
    """Compute x, the scaled and capped logits.

    With softcap, x is finite even where logits are inf: columns must be masked off after this.
    """
    x = logits
    if logit_scale is not None:
        x = x * logit_scale
    if softcap is not None:
        x = soft_capped(x, softcap)
    return x


@triton.jit
def log_sum_sq_probs(squares, sum):
    """Compute log(sum_c p_c**2) from the sums of exp(x_c - maximum)**2 and of
    exp(x_c - maximum)."""
    return tl.log(squares) - 2.0 * tl.log(sum)


@triton.jit
def logit_gradient(
    x, shifted, exp, class_weight, soft, smoothed, hard, dentropy, entropy, logit_scale, softcap,
    HAS_SMOOTHING: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of a tile of logits. hard is 0 except for the target's class.

    shifted is x less a number of the row, and exp is exp(shifted). p is exp times a factor of the
    row, which is part of soft and dentropy, and whose logarithm is part of entropy.
    """
    dx = soft * exp - hard
    if dentropy is not None:
        # Where exp is 0, the product is 0 for -inf too.
        dx -= dentropy * (exp * (tl.maximum(shifted, VANISHING) + entropy))
    if HAS_SMOOTHING:
        dx -= smoothed * class_weight
    if softcap is not None:
        dx *= soft_cap_slope(x, softcap)
    if logit_scale is not None:
        dx *= logit_scale
    return dx


@triton.jit
def softmax_and_lse(x):
    """Return the probabilities, and the logarithm of the sum of exponentials, of each row."""
    maximum = tl.max(x, 1)[:, None]
    exponentials = tl.exp(x - maximum)
    sum = tl.sum(exponentials, 1)[:, None]
    # One division a row.
    return exponentials * (1.0 / sum), maximum + tl.log(sum)
