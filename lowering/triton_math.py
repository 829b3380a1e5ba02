"""Arithmetic that the kernels of every device share. Values are float32 unless `dtype` rounds
them."""

import triton
import triton.language as tl

# float32's lowest number, for a running maximum to start from. exp(-inf - LOWEST) is 0 where
# exp(-inf - -inf) is NaN: a tile of nothing but -inf adds nothing to a sum of exponentials, and a
# row of nothing but -inf comes to 0 / 0.
LOWEST = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def rounded(value, dtype: tl.constexpr):
    """value as storing it in dtype would leave it."""
    return value.to(dtype).to(tl.float32)


@triton.jit
def rms_square(x, dtype: tl.constexpr, CASTING_MODE: tl.constexpr):
    """What rms_norm sums over a row."""
    square = x * x
    if CASTING_MODE == "none":
        square = rounded(square, dtype)
    return square


@triton.jit
def rms_rstd(sum_of_squares, N, eps, dtype: tl.constexpr, CASTING_MODE: tl.constexpr):
    """1 / rms of rows of N elements."""
    mean_square = sum_of_squares / N
    if CASTING_MODE == "none":
        mean_square = rounded(mean_square, dtype)
        return rounded(tl.rsqrt(rounded(mean_square + eps, dtype)), dtype)
    return tl.rsqrt(mean_square + eps)


@triton.jit
def rms_scaled(
    x,
    rstd,
    weight,
    offset,
    dtype: tl.constexpr,
    CASTING_MODE: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
):
    """x * rstd * (weight + offset), rounded as the casting mode says; weight is None without
    one."""
    y = x * rstd
    if HAS_WEIGHT:
        scale = weight + offset
        if CASTING_MODE == "none":
            scale = rounded(scale, dtype)
        if CASTING_MODE != "gemma":
            y = rounded(y, dtype)
        y = y * scale
    return y


@triton.jit
def moments_merged(count_a, mean_a, m2_a, count_b, mean_b, m2_b):
    """Count, mean and sum of squared deviations of two samples together (Chan, Golub and LeVeque).

    Stable where sum(x**2) - N * mean**2 cancels. An empty sample has count 0.
    """
    count = count_a + count_b
    share = count_b / tl.maximum(count, 1.0)
    delta = mean_b - mean_a
    return count, mean_a + delta * share, m2_a + m2_b + delta * delta * count_a * share


@triton.jit
def lanes_updated(x, mask, tile, mean, m2):
    """Add one tile to every lane's own mean and sum of squared deviations (Welford).

    tile counts the tiles before this one, all of them unmasked: the lane's element count.
    """
    inverse = 1.0 / (tile + 1)
    delta = tl.where(mask, x - mean, 0.0)
    mean += delta * inverse
    return mean, m2 + delta * tl.where(mask, x - mean, 0.0)


@triton.jit
def lane_counts(index, length, BLOCK: tl.constexpr):
    """How many of `length` elements, dealt to BLOCK lanes in turn, fall to each lane."""
    return ((length - index + BLOCK - 1) // BLOCK).to(tl.float32)
