"""@triton.jit helpers for tiles of (BLOCK_M, BLOCK_N).

The start of a tile is an int64 scalar added to the pointer; the offsets within it are int32,
because int64 arithmetic on a tile runs as a scalar loop.
"""

import triton
import triton.language as tl


@triton.jit
def tile_offsets(N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The rows and columns of a tile, and its elements' offsets in a tensor with rows of N."""
    rows = tl.arange(0, BLOCK_M)[:, None]
    cols = tl.arange(0, BLOCK_N)[None, :]
    return rows, cols, rows * N + cols


@triton.jit
def load(ptr, offsets, mask):
    """Load elements as float32, with 0 where masked off."""
    return tl.load(ptr + offsets, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def load_logits(ptr, offsets, mask):
    """Load elements as float32, with -inf where masked off: it changes no maximum, and adds 0 to a
    sum of exponentials."""
    return tl.load(ptr + offsets, mask=mask, other=-float("inf")).to(tl.float32)


@triton.jit
def online_updated(x, maximum, sum):
    """Add a tile to each row's maximum and its sum of exponentials relative to that."""
    higher = tl.maximum(maximum, tl.max(x, axis=1)[:, None])
    sum = sum * tl.exp(maximum - higher) + tl.sum(tl.exp(x - higher), axis=1)[:, None]
    return higher, sum


@triton.jit
def remaining(size, first, BLOCK: tl.constexpr):
    """How many of the BLOCK elements from `first` on are within `size`, as int32."""
    return tl.minimum(size - first, BLOCK).to(tl.int32)


@triton.jit
def within(indices, count):
    """1.0 where an index is below count, else 0.0.

    Multiplying by it masks a tile; tl.where would do so in a scalar loop on CANN 8.5.
    """
    return tl.minimum(tl.maximum(count - indices, 0), 1).to(tl.float32)


@triton.jit
def lanes_updated(x, inside, visits, mean, m2):
    """Add the visits-th element to each lane's mean and sum of squared deviations (Welford)."""
    delta = (x - mean) * inside
    mean += delta * (1.0 / visits)
    return mean, m2 + delta * (x - mean)


@triton.jit
def lane_counts(lanes, length, BLOCK: tl.constexpr):
    """How many of `length` elements each lane has, if BLOCK lanes take them in turn."""
    turns = length // BLOCK
    return within(lanes, length - turns * BLOCK) + turns


@triton.jit
def lanes_merged(lane_mean, m2, counts, length):
    """Return the rows' mean, the lanes' deviations from it, a rest that is to be added to the mean,
    and the rows' sum of squared deviations.

    The rest is the rounding error of the mean's sum. If the mean is far larger than the deviation,
    every xhat would be off by it.
    """
    mean = tl.sum(lane_mean * counts, axis=1)[:, None] / length
    deviation = lane_mean - mean
    weighted = deviation * counts
    rest = tl.sum(weighted, axis=1)[:, None] / length
    return mean, deviation, rest, tl.sum(m2 + weighted * deviation, axis=1)[:, None]
