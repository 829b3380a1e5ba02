"""Arithmetic of sparsemax's kernels, for every device.

tau, relative to a row's maximum, is the root of f(tau) = sum(max(x - tau, 0)) - 1, which is convex
and piecewise linear; its slope is -k, for k elements above tau. Newton's iteration starts at the
lowest tau that is possible, -1. In exact arithmetic every step raises tau and lowers k, until tau
lies on the root's piece: from there one step ends at the root. The kernels go on while k falls, so
that the iteration ends whatever is rounded; its last step, where the sum is 1 up to rounding,
corrects what the steps before have rounded.

For such a function a step's ratios of f and of k add up to at most 1, and their product is at most
1 / 4. Therefore f * k, which starts below N**2, is below N**2 / 4**j after j steps, and f is below
2**-24 after log2(N) + 12 steps. Rows of 131072 normal values take 2 to 7 steps with a deviation of
1 or more, and up to 14 with a deviation of 0.1.
"""

import triton
import triton.language as tl


@triton.jit
def below_maximum(x, maximum):
    """Compute max(x - maximum, -1): an element at -1 is outside of the support. NaN stays NaN."""
    return tl.maximum(x - maximum, -1.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def above(below, tau):
    """Compute max(below - tau, 0); NaN stays NaN."""
    return tl.maximum(below - tau, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def is_above(below, tau):
    """Return 1.0 where an element is above tau, else 0.0."""
    return tl.where(below > tau, 1.0, 0.0)


@triton.jit
def newton_step(tau, count, active, sum, higher):
    """Return tau, count and active after a step of Newton's iteration.

    `sum` is the sum of `above`, `higher` the number of elements above tau, and `count` their number
    a step before. Rows where `active` is 0 have ended: their tau stays, whatever the other rows of
    the tile need.
    """
    tau = tl.where(active > 0, tau + (sum - 1.0) / higher, tau)
    return tau, higher, tl.where(higher < count, active, 0.0)


@triton.jit
def supported(dy, y):
    """Return dy inside of the support of y, else 0."""
    return tl.where(y > 0, dy, 0.0)


@triton.jit
def sparsemax_gradient(dy, y, mean):
    """Compute dx. Outside of the support it is y, which is 0 or NaN."""
    return tl.where(y > 0, dy - mean, y)
