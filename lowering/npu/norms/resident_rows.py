"""@triton.jit helpers for a row that stays in the Unified Buffer in its own dtype, and is taken as
float32 one piece at a time.

triton-ascend slices a buffer in place, at an offset known only at run time. Upstream Triton, whose
interpreter runs the tests, has no slices: there a piece is selected by a sum.
"""

import triton
import triton.language as tl

from ..tile import load, remaining

try:
    # Where triton-ascend has them after 3.2.
    from triton.language.extra.cann import extension as slices
except ImportError:
    slices = tl

HAS_SLICES = tl.constexpr(hasattr(slices, "extract_slice"))


@triton.jit
def kept_row(ptr, N, ROW: tl.constexpr, OTHER: tl.constexpr = 0.0):
    """Load a row of N elements as (1, ROW), with OTHER beyond N."""
    cols = tl.arange(0, ROW)[None, :]
    return tl.load(ptr + cols, mask=cols < N, other=OTHER)


@triton.jit
def piece(row, col, SIZE: tl.constexpr):
    """The SIZE columns from `col` on, a multiple of SIZE, of a row (1, ROW), as float32. The row
    may be widened already."""
    if row.shape[0] > 1:
        return line(row, col // SIZE)
    elif HAS_SLICES:
        part = slices.extract_slice(row, (0, col), (1, SIZE), (1, 1))
        return part.to(tl.float32)
    else:
        pieces: tl.constexpr = row.shape[1] // SIZE
        return line(tl.reshape(row.to(tl.float32), (pieces, SIZE)), col // SIZE)


@triton.jit
def widened(row, SIZE: tl.constexpr):
    """A row (1, ROW) as float32 lines of SIZE. A piece of row.to(float32) would be widened again:
    triton-ascend slices before it widens."""
    return tl.reshape(row.to(tl.float32), (row.shape[1] // SIZE, SIZE))


@triton.jit
def line(lines, index):
    """One line of (lines, SIZE), as (1, SIZE)."""
    if HAS_SLICES:
        return slices.extract_slice(lines, (index, 0), (1, lines.shape[1]), (1, 1))
    else:
        chosen = tl.arange(0, lines.shape[0])[:, None] == index
        return tl.sum(tl.where(chosen, lines, 0.0), axis=0)[None, :]


@triton.jit
def line_added(lines, index, part):
    """lines with `part` added to one of them.

    A loop may carry lines. CANN's compilers find no place for a row (1, ROW) of which a loop
    changes a piece.
    """
    if HAS_SLICES:
        sum = line(lines, index) + part
        return slices.insert_slice(lines, sum, (index, 0), (1, lines.shape[1]), (1, 1))
    else:
        chosen = tl.arange(0, lines.shape[0])[:, None] == index
        return tl.where(chosen, lines + part, lines)


@triton.jit
def kept_mean(x_row, N, SIZE: tl.constexpr):
    """The mean of a kept row."""
    sums = tl.zeros((1, SIZE), tl.float32)
    for col in tl.range(0, N, SIZE):
        sums += piece(x_row, col, SIZE)
    return tl.sum(sums, axis=1)[:, None] / N


@triton.jit
def kept_or_loaded(row, ptr, N, col, SIZE: tl.constexpr):
    """A piece of a row, from the buffer if the row is kept and else from memory, as float32."""
    if row is not None:
        return piece(row, col, SIZE)
    else:
        cols = tl.arange(0, SIZE)[None, :]
        return load(ptr + col, cols, cols < remaining(N, col, SIZE))


@triton.jit
def channels_of(tile, channel, SIZE: tl.constexpr):
    """SIZE rows from `channel` on, a multiple of SIZE, of a kept tile, as float32."""
    if HAS_SLICES:
        part = slices.extract_slice(tile, (channel, 0), (SIZE, tile.shape[1]), (1, 1))
        return part.to(tl.float32)
    else:
        parts: tl.constexpr = tile.shape[0] // SIZE
        split = tl.reshape(tile.to(tl.float32), (parts, SIZE, tile.shape[1]))
        chosen = tl.arange(0, parts)[:, None, None] == channel // SIZE
        return tl.sum(tl.where(chosen, split, 0.0), axis=0)
