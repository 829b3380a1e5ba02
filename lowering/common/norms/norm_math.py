"""Arithmetic of the kernels of rms_norm, gated_rms_norm and modulated norms, for every device.
Values are float32, or rounded to `dtype`.

NORM_FIRST, of gated_rms_norm: x is normalised and then gated; else x * factor is normalised.
"""

import triton
import triton.language as tl

from ..activations.activation_math import silu_slope
from ..triton_math import rounded


@triton.jit
def rms_square(x, dtype: tl.constexpr, CASTING_MODE: tl.constexpr):
    """Compute the squares that rms_norm sums over a row."""
    square = x * x
    if CASTING_MODE == "none":
        square = rounded(square, dtype)
    return square


@triton.jit
def rms_rstd(sum_of_squares, N, eps, dtype: tl.constexpr, CASTING_MODE: tl.constexpr):
    """Compute 1 / rms of rows of N elements."""
    mean_square = sum_of_squares / N
    if CASTING_MODE == "none":
        mean_square = rounded(mean_square, dtype)
        return rounded(tl.rsqrt(rounded(mean_square + eps, dtype)), dtype)
    return tl.rsqrt(mean_square + eps)


@triton.jit
def rms_scaled(
    x, rstd, weight, offset,
    dtype: tl.constexpr, CASTING_MODE: tl.constexpr,
):  # fmt: skip
    """Compute x * rstd * (weight + offset), rounded as the casting mode says; weight may be
    None."""
    y = x * rstd
    if weight is not None:
        scale = weight + offset
        if CASTING_MODE == "none":
            scale = rounded(scale, dtype)
        if CASTING_MODE != "gemma":
            y = rounded(y, dtype)
        y = y * scale
    return y


@triton.jit
def modulated(y, scale, shift, dtype: tl.constexpr, ROUNDS: tl.constexpr):
    """Compute y * (1 + scale) + shift, for the result y of a norm of `dtype`. scale and shift have
    their own dtypes; shift may be None.

    If ROUNDS, every operation rounds to the dtype that its result has in PyTorch: y is rounded to
    `dtype`, 1 + scale to the dtype of scale, and the product to `dtype` if scale has it too.
    Results of mixed dtypes are float32 in PyTorch as well.
    """
    factor = 1.0 + scale.to(tl.float32)
    if ROUNDS:
        y = rounded(y, dtype) * rounded(factor, scale.dtype)
        if scale.dtype == dtype:
            y = rounded(y, dtype)
    else:
        y = y * factor
    if shift is not None:
        y += shift.to(tl.float32)
    return y


@triton.jit
def gate_factor(gate, ACTIVATION: tl.constexpr):
    """Compute the factor that a gate multiplies by."""
    if ACTIVATION == "silu":
        return gate * tl.sigmoid(gate)
    else:
        return tl.sigmoid(gate)


@triton.jit
def gate_slope(gate, ACTIVATION: tl.constexpr):
    """Compute the derivative of gate_factor."""
    if ACTIVATION == "silu":
        return silu_slope(gate)
    else:
        sigmoid = tl.sigmoid(gate)
        return sigmoid * (1.0 - sigmoid)


@triton.jit
def gated_norm_result(
    s, rstd, weight, gate,
    dtype: tl.constexpr, NORM_FIRST: tl.constexpr,
    ACTIVATION: tl.constexpr, CASTING_MODE: tl.constexpr,
):  # fmt: skip
    """Compute the result y for s, which is x or, without NORM_FIRST, x times the gate's factor.
    weight is in its own dtype, or None.

    A product with a weight of another dtype is float32 in PyTorch, and is not rounded.
    """
    y = s * rstd
    if CASTING_MODE == "llama":
        y = rounded(y, dtype)
    if weight is not None:
        y = y * weight.to(tl.float32)
        if CASTING_MODE == "llama" and weight.dtype == dtype:
            y = rounded(y, dtype)
    if NORM_FIRST:
        y = y * gate_factor(gate, ACTIVATION)
    return y


@triton.jit
def gated_norm_terms(
    dy, x, gate, weight,
    NORM_FIRST: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Return s, the tensor that is normalised, and g, the gradient of s * rstd."""
    factor = gate_factor(gate, ACTIVATION)
    if NORM_FIRST:
        s = x
        g = dy * factor
    else:
        s = x * factor
        g = dy
    if weight is not None:
        g = g * weight
    return s, g


@triton.jit
def gated_norm_gradients(
    dy, x, gate, weight, rstd, projection,
    NORM_FIRST: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Return dx, dgate, and the terms whose sum is dweight; projection is mean(g * s * rstd)."""
    factor = gate_factor(gate, ACTIVATION)
    slope = gate_slope(gate, ACTIVATION)
    if NORM_FIRST:
        shat = x * rstd
        d = dy * factor
        # The slope comes first: if it is 0 and the rest would be inf, the product is 0.
        dgate = dy * slope * shat
        if weight is not None:
            dgate = dgate * weight
    else:
        shat = x * factor * rstd
        d = dy
    g = d
    if weight is not None:
        g = d * weight
    dx = rstd * (g - shat * projection)
    if not NORM_FIRST:
        dgate = dx * slope * x
        dx = dx * factor
    return dx, dgate, d * shat
