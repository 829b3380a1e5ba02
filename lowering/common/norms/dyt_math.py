"""Arithmetic of dyt's kernels, for every device."""

import triton
import triton.language as tl

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def _where_it_cancels(z, t):
    """Replace t, which is tanh(z) with an error of a unit in the last place of 1, by a polynomial
    where abs(z) < 0.625: there the error of t is large relative to tanh(z). The polynomial is
    fitted with a relative error of 5e-9."""
    square = z * z
    near = -0.005704985 * square + 0.020639084
    near = near * square - 0.053739715
    near = near * square + 0.13331442
    near = near * square - 0.3333328
    near = near * square * z + z
    return tl.where(square < 0.390625, near, t)


@triton.jit
def tanh(z):
    """Compute tanh(z) = 1 - 2 / (1 + exp(2 * z)), which has its limits where exp(2 * z) is 0 or
    inf."""
    r = 1.0 / (1.0 + tl.exp2(z * (2.0 * LOG2E)))
    return _where_it_cancels(z, 1.0 - 2.0 * r)


@triton.jit
def tanh_and_slope(z):
    """Compute tanh(z), and its slope 1 - tanh(z)**2.

    Both come from e = exp(-2 * abs(z)), without overflow, and the slope without the cancellation of
    1 - tanh(z)**2.
    """
    e = tl.exp2(tl.abs(z) * (-2.0 * LOG2E))
    r = 1.0 / (1.0 + e)
    far = 2.0 * r - 1.0
    return _where_it_cancels(z, tl.where(z < 0, -far, far)), 4.0 * e * r * r


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
