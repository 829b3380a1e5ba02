"""Arithmetic that the kernels of every device share. Values are float32, or rounded to `dtype`."""

import triton
import triton.language as tl

# float32's lowest number, the start of a running maximum. exp(-inf - LOWEST) is 0, and
# exp(-inf - -inf) is NaN: a tile that is all -inf adds 0 to a sum of exponentials, and a row that
# is all -inf gives 0 / 0.
LOWEST = tl.constexpr(-3.4028234663852886e38)
# A stand-in for -inf where it is multiplied: exp(VANISHING) is 0 and 0 * VANISHING is 0, where
# 0 * -inf is NaN.
VANISHING = tl.constexpr(-1e30)


@triton.jit
def flushed_exp(x):
    """Compute exp(x), flushed to 0 below 2**-126: tl.exp takes three more instructions for the
    subnormal results."""
    return tl.exp2(x * 1.4426950408889634)


@triton.jit
def rounded_lse(maximum, log_sum):
    """Return lse = maximum + log_sum, rounded, and its rounding error, the exact sum less lse: 0
    where lse is not finite."""
    lse = maximum + log_sum
    # The larger of two numbers, less their rounded sum, is exact.
    by_maximum = (maximum - lse) + log_sum
    by_sum = (log_sum - lse) + maximum
    error = tl.where(tl.abs(maximum) < tl.abs(log_sum), by_sum, by_maximum)
    # inf - inf is NaN, which compares as unequal.
    return lse, tl.where(lse - lse == 0.0, error, 0.0)


@triton.jit
def log_of_normal(x):
    """Compute log(x) of positive normal numbers, within 1.1 units in the last place.

    Compiled for sm_90, tl.log takes 39 instructions, and this 15. It is log(m) + k log(2) with m in
    [2/3, 4/3]. With t = m - 1, log(m) is t + t**2 times a polynomial of least relative error.
    """
    bits = x.to(tl.int32, bitcast=True)
    # The exponent's bits of k, where 0x3F2AAAAB is 2/3.
    exponent = (bits - 0x3F2AAAAB) & -0x800000
    t = (bits - exponent).to(tl.float32, bitcast=True) - 1.0
    y = t * 0.14026343822479248 - 0.15388542413711548
    y = y * t + 0.13995809853076935
    y = y * t - 0.1641595959663391
    y = y * t + 0.20011168718338013
    y = y * t - 0.2500782012939453
    y = y * t + 0.33333197236061096
    y = y * t - 0.49999937415122986
    # log(2) * 2**-23: the exponent is k * 2**23.
    return exponent.to(tl.float32) * 8.262958405176314e-08 + ((y * t) * t + t)


@triton.jit
def rounded(value, dtype: tl.constexpr):
    """Round to dtype, and return float32."""
    return value.to(dtype).to(tl.float32)


@triton.jit
def to_float32_again(x):
    """Convert to float32 again, in another way (a bit shift if x is bfloat16), so that the compiler
    cannot reuse an earlier x.to(float32).

    Between its two uses a row then stays in registers in its own dtype: half as many for bfloat16.
    """
    if x.dtype == tl.bfloat16:
        bits = x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
        return bits.to(tl.float32, bitcast=True)
    return x.to(tl.float32)


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
def folded(x, FOLD: tl.constexpr):
    """Flatten a tile and sum every FOLD neighbours.

    One thread holds the neighbours, so no data moves between threads, and an accumulator takes
    1 / FOLD of a tile's registers.
    """
    tile: tl.constexpr = x.numel
    return tl.sum(tl.reshape(x, (tile // FOLD, FOLD)), 1)


@triton.jit
def gated(gate, up, a, b, c, ACTIVATION: tl.constexpr):
    """Compute a gated activation. a, b and c are its scalar options, in their order."""
    if ACTIVATION == "swiglu":
        z = gate * a
        return z * tl.sigmoid(z) * up * b
    elif ACTIVATION == "clamped_swiglu":
        gate, up = _clamped(gate, up, b)
        return gate * tl.sigmoid(gate * a) * (up + c)
    elif ACTIVATION == "geglu_tanh":
        return gate * tl.sigmoid(_gelu_argument(gate)) * up
    else:
        return gate * _normal_cumulative(gate) * up


@triton.jit
def gated_gradients(dy, gate, up, a, b, c, ACTIVATION: tl.constexpr):
    """Compute the gradients of gate and up.

    dy is multiplied by the slope first: if the slope is 0 and up * dy would be inf, the product
    is 0.
    """
    if ACTIVATION == "swiglu":
        z = gate * a
        dy = dy * b
        return dy * silu_slope(z) * up * a, dy * (z * tl.sigmoid(z))
    elif ACTIVATION == "clamped_swiglu":
        inside_gate = (gate <= b).to(tl.float32)
        inside_up = (tl.abs(up) <= b).to(tl.float32)
        gate, up = _clamped(gate, up, b)
        z = gate * a
        dgate = dy * silu_slope(z) * (up + c) * inside_gate
        return dgate, dy * (gate * tl.sigmoid(z)) * inside_up
    elif ACTIVATION == "geglu_tanh":
        # Beyond 30 the sigmoid is 0 or 1, and gate**3 = inf would give 0 * inf.
        near = within(gate, 30.0)
        sigmoid = tl.sigmoid(_gelu_argument(near))
        derivative = 1.5957691216057308 * (1.0 + 0.134145 * near * near)
        slope = sigmoid * (1.0 + (1.0 - sigmoid) * near * derivative)
        return dy * slope * up, dy * (gate * sigmoid)
    else:
        cumulative = _normal_cumulative(gate)
        slope = cumulative + gate * tl.exp(gate * gate * -0.5) * 0.3989422804014327
        return dy * slope * up, dy * (gate * cumulative)


@triton.jit
def within(x, limit):
    """Clamp x to [-limit, limit]; NaN stays NaN."""
    x = tl.minimum(x, limit, propagate_nan=tl.PropagateNan.ALL)
    return tl.maximum(x, -limit, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def relu(x):
    """Compute max(x, 0); NaN stays NaN."""
    return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def silu_slope(z):
    """Compute the derivative of z * sigmoid(z)."""
    # Beyond 1000 the sigmoid is 0 or 1, and z = inf would give 0 * inf. The sigmoid is that of z
    # itself, which the other gradient needs too.
    sigmoid = tl.sigmoid(z)
    return sigmoid * (1.0 + within(z, 1000.0) * (1.0 - sigmoid))


@triton.jit
def _clamped(gate, up, limit):
    """Clamp gate from above, and up from both sides."""
    return tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL), within(up, limit)


@triton.jit
def _gelu_argument(x):
    """Compute 2 * v, where sigmoid(2 * v) = (1 + tanh(v)) / 2 is x's factor in GELU with tanh."""
    return 1.5957691216057308 * x * (1.0 + 0.044715 * x * x)


@triton.jit
def _normal_cumulative(x):
    return 0.5 + 0.5 * tl.erf(x * 0.7071067811865476)
