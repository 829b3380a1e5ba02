"""@triton.jit helpers for a kept row: one that stays in the Unified Buffer in its own dtype, and is
computed in float32 one piece at a time.

triton-ascend slices a buffer in place, at an offset known only at run time. Upstream Triton, whose
interpreter runs the tests, has no slices: there a piece is selected by a masked sum.
"""

import triton
import triton.language as tl

from ..tile import load, remaining

try:
    # triton-ascend 3.2 has the slices in triton.language, later versions in this module.
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
    """Return the SIZE columns from `col` on, a multiple of SIZE, of a kept row, as float32.

    The row is (1, ROW), or the float32 lines that `widened` returns.
    """
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
    """Return a row (1, ROW) as float32 lines of SIZE, one for each piece.

    `piece(row.to(float32), ...)` would widen the piece at each use: triton-ascend slices before it
    widens.
    """
    return tl.reshape(row.to(tl.float32), (row.shape[1] // SIZE, SIZE))


@triton.jit
def line(lines, index):
    """Return one line of (lines, SIZE), as (1, SIZE)."""
    if HAS_SLICES:
        return slices.extract_slice(lines, (index, 0), (1, lines.shape[1]), (1, 1))
    else:
        chosen = tl.arange(0, lines.shape[0])[:, None] == index
        return tl.sum(tl.where(chosen, lines, 0.0), axis=0)[None, :]


@triton.jit
def line_added(lines, index, part):
    """Return the lines with `part` added to one of them.

    Lines, and not a row (1, ROW), because a loop carries them: CANN's compilers find no place for
    a row of which a loop changes a piece.
    """
    if HAS_SLICES:
        sum = line(lines, index) + part
        return slices.insert_slice(lines, sum, (index, 0), (1, lines.shape[1]), (1, 1))
    else:
        chosen = tl.arange(0, lines.shape[0])[:, None] == index
        return tl.where(chosen, lines + part, lines)


@triton.jit
def kept_mean(x_row, N, SIZE: tl.constexpr):
    """Return the mean of a kept row, (1, 1)."""
    sums = tl.zeros((1, SIZE), tl.float32)
    for col in tl.range(0, N, SIZE):
        sums += piece(x_row, col, SIZE)
    return tl.sum(sums, axis=1)[:, None] / N


@triton.jit
def kept_or_loaded(row, ptr, N, col, SIZE: tl.constexpr):
    """Return a piece of a row as float32, from the kept row, or from memory if `row` is None."""
    if row is not None:
        return piece(row, col, SIZE)
    else:
        cols = tl.arange(0, SIZE)[None, :]
        return load(ptr + col, cols, cols < remaining(N, col, SIZE))


@triton.jit
def channels_of(tile, channel, SIZE: tl.constexpr):
    """Return SIZE channels from `channel` on, a multiple of SIZE, of a kept tile, as float32."""
    if HAS_SLICES:
        part = slices.extract_slice(tile, (channel, 0), (SIZE, tile.shape[1]), (1, 1))
        return part.to(tl.float32)
    else:
        parts: tl.constexpr = tile.shape[0] // SIZE
        split = tl.reshape(tile.to(tl.float32), (parts, SIZE, tile.shape[1]))
        chosen = tl.arange(0, parts)[:, None, None] == channel // SIZE
        return tl.sum(tl.where(chosen, split, 0.0), axis=0)
