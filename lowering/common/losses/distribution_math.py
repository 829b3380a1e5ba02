"""Arithmetic of kl_div, jsd and tvd that the kernels of both devices share. The values of KIND are
those of `ops.losses.distribution_loss.DistributionLoss.kind`."""

import triton
import triton.language as tl

from ..triton_math import log_of_normal
from .divergence_math import shares


@triton.jit
def loaded(ptrs, mask, KIND: tl.constexpr):
    """Load a tile of x or y as float32. Where both are masked off, the term is 0: x and y are 0, or
    for kinds that take logarithms -inf."""
    if KIND == "kl_div" or KIND == "tvd":
        return tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)
    else:
        return tl.load(ptrs, mask=mask, other=-float("inf")).to(tl.float32)


@triton.jit
def terms(x, y, scalar, KIND: tl.constexpr, BY_POLYNOMIAL: tl.constexpr):
    """Compute the terms that are summed over a row. BY_POLYNOMIAL is that of `shares`; kl_div's eps
    is then a normal number."""
    if KIND == "tvd":
        return tl.abs(x - y) * 0.5
    elif KIND == "kl_div":
        return _kl_terms(y, _logarithm(y, scalar, BY_POLYNOMIAL), x)
    elif KIND == "forward_kl":
        return _kl_terms(tl.exp(y), y, x)
    elif KIND == "reverse_kl":
        return _kl_terms(tl.exp(x), x, y)
    else:
        of_x, of_y = shares(y, x, tl.exp(y), tl.exp(x), scalar, KIND, BY_POLYNOMIAL)
        return of_x + of_y


@triton.jit
def slopes(x, y, scalar, KIND: tl.constexpr, BY_POLYNOMIAL: tl.constexpr):
    """Compute the derivatives of a term with respect to x and to y."""
    if KIND == "tvd":
        half = tl.where(x > y, 0.5, tl.where(x < y, -0.5, 0.0))
        return half, -half
    elif KIND == "kl_div":
        own = tl.where(_is_below(y, scalar), 0.0, 1.0)
        return -y, _logarithm(y, scalar, BY_POLYNOMIAL) - x + own
    elif KIND == "forward_kl":
        p = tl.exp(y)
        return -p, _kl_terms(p, y, x) + p
    elif KIND == "reverse_kl":
        q = tl.exp(x)
        return _kl_terms(q, x, y) + q, -q
    else:
        return shares(y, x, tl.exp(y), tl.exp(x), scalar, KIND, BY_POLYNOMIAL)


@triton.jit
def _kl_terms(p, log_p, log_q):
    """Compute p * (log_p - log_q), and 0 where p is 0, though the logarithms may be -inf; NaN
    stays."""
    nothing = (p == 0.0) & (log_q < float("inf"))
    return tl.where(nothing, 0.0, p * (log_p - log_q))


@triton.jit
def _is_below(p, eps):
    """Return whether log(max(p, eps)) has no slope; not for a negative p, whose logarithm is
    NaN."""
    return (p >= 0.0) & (p < eps)


@triton.jit
def _logarithm(p, eps, BY_POLYNOMIAL: tl.constexpr):
    """Compute log(max(p, eps)); NaN for a negative p."""
    floored = tl.where(_is_below(p, eps), eps, p)
    if BY_POLYNOMIAL:
        # The polynomial is for positive finite numbers: log(inf) is inf, and the logarithm of NaN
        # and of negative numbers NaN.
        other = tl.where(floored > 0.0, floored, float("nan"))
        finite = (floored > 0.0) & (floored < float("inf"))
        return tl.where(finite, log_of_normal(floored), other)
    else:
        return tl.log(floored)
