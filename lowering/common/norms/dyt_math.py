"""Arithmetic of dyt's kernels, for every device."""

import triton
import triton.language as tl  # noqa: F401, which Triton's interpreter looks for.

from ..triton_math import tanh, tanh_and_slope


@triton.jit
def dyt_result(x, alpha, gamma, beta):
    """Compute gamma * tanh(alpha * x) + beta; beta may be None."""
    y = tanh(x * alpha) * gamma
    if beta is not None:
        y += beta
    return y


@triton.jit
def dyt_gradients(dy, x, alpha, gamma):
    """Return dx, and the terms whose sums are dalpha and dgamma. That of dbeta is dy."""
    t, slope = tanh_and_slope(x * alpha)
    g = dy * gamma * slope
    return alpha * g, g * x, dy * t
