"""@triton.jit helpers for tiles of (BLOCK_M, BLOCK_N).

The start of a tile is an int64 scalar added to the pointer; the offsets within it are int32,
because int64 arithmetic on a tile runs as a scalar loop. A lane is a column of the tile: kernels
that go along a row in tiles keep a sum, a mean or a maximum for each lane, and reduce the lanes
once at the end of the row.
"""

import triton
import triton.language as tl


@triton.jit
def tile_offsets(N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return a tile's row and column indices, and its elements' offsets in rows of N columns."""
    rows = tl.arange(0, BLOCK_M)[:, None]
    cols = tl.arange(0, BLOCK_N)[None, :]
    return rows, cols, rows * N + cols


@triton.jit
def load(ptr, offsets, mask):
    """Load elements as float32, with 0 where masked off."""
    return tl.load(ptr + offsets, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def load_logits(ptr, offsets, mask):
    """Load elements as float32, with -inf where masked off.

    -inf changes no maximum, and adds 0 to a sum of exponentials.
    """
    return tl.load(ptr + offsets, mask=mask, other=-float("inf")).to(tl.float32)


@triton.jit
def online_updated(x, maximum, sum):
    """Add a tile to each row's maximum and its sum of exponentials relative to the maximum.

    The first maximum must be finite (LOWEST): -inf - -inf would be NaN.
    """
    higher = tl.maximum(maximum, tl.max(x, axis=1)[:, None])
    sum = sum * tl.exp(maximum - higher) + tl.sum(tl.exp(x - higher), axis=1)[:, None]
    return higher, sum


@triton.jit
def remaining(size, first, BLOCK: tl.constexpr):
    """Return how many of the BLOCK elements from `first` on are within `size`, as int32.

    Column indices are compared with it: a comparison of int64 would run as a scalar loop.
    """
    return tl.minimum(size - first, BLOCK).to(tl.int32)


@triton.jit
def within(indices, count):
    """Return 1.0 where an index is below count, else 0.0.

    Multiplying by it masks a tile; tl.where would do so in a scalar loop on CANN 8.5.
    """
    return tl.minimum(tl.maximum(count - indices, 0), 1).to(tl.float32)


@triton.jit
def lanes_updated(x, inside, visits, mean, m2):
    """Add the visits-th element to each lane's mean and sum of squared deviations (Welford).

    inside: 1.0, or 0.0 for a lane that has no further element.
    """
    delta = (x - mean) * inside
    mean += delta * (1.0 / visits)
    return mean, m2 + delta * (x - mean)


@triton.jit
def lane_counts(lanes, length, BLOCK: tl.constexpr):
    """Return how many of `length` elements each lane has, if BLOCK lanes take them in turn."""
    turns = length // BLOCK
    return within(lanes, length - turns * BLOCK) + turns


@triton.jit
def lanes_merged(lane_mean, m2, counts, length):
    """Merge the lanes of each row.

    Return the rows' mean, the lanes' deviations from it, a rest that the caller adds to the mean,
    and the rows' sum of squared deviations. The rest is the rounding error of the mean: without it,
    every xhat would be off by it if the mean is far larger than the deviation.
    """
    mean = tl.sum(lane_mean * counts, axis=1)[:, None] / length
    deviation = lane_mean - mean
    weighted = deviation * counts
    rest = tl.sum(weighted, axis=1)[:, None] / length
    return mean, deviation, rest, tl.sum(m2 + weighted * deviation, axis=1)[:, None]
