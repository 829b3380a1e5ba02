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
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def flushed_exp(x):
    """Compute exp(x), flushed to 0 below 2**-126: tl.exp takes three more instructions for the
    subnormal results."""
    return tl.exp2(x * LOG2E)


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
def soft_capped(x, softcap):
    """Compute softcap * tanh(x / softcap), which is finite for infinite x."""
    return softcap * tanh(x * (1.0 / softcap))


@triton.jit
def soft_cap_slope(y, softcap):
    """Compute the slope of y = softcap * tanh(x / softcap), 1 - tanh(x / softcap)**2."""
    turn = y * (1.0 / softcap)
    return 1.0 - turn * turn


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
def folded(x, FOLD: tl.constexpr):
    """Flatten a tile and sum every FOLD neighbours.

    One thread holds the neighbours, so no data moves between threads, and an accumulator takes
    1 / FOLD of a tile's registers.
    """
    tile: tl.constexpr = x.numel
    return tl.sum(tl.reshape(x, (tile // FOLD, FOLD)), 1)
