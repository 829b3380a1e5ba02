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
def folded(x, FOLD: tl.constexpr):
    """Flatten a tile and sum every FOLD neighbours.

    One thread holds the neighbours, so no data moves between threads, and an accumulator takes
    1 / FOLD of a tile's registers.
    """
    tile: tl.constexpr = x.numel
    return tl.sum(tl.reshape(x, (tile // FOLD, FOLD)), 1)
