"""Tiles of rope's pairs and tables, (positions, heads, pairs), and the tables as arguments of a
kernel."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....ops.rope.rope import PairLayout, holds_matrices


@triton.jit
def load_pairs(
    ptrs, inside, first, HALF,
    INTERLEAVED: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # Load the two elements of BLOCK_N pairs from the pair `first` on, of each row, as float32.
    if INTERLEAVED:
        cols = 2 * first + tl.arange(0, 2 * BLOCK_N)[None, None, :]
        mask = inside & (cols < 2 * HALF)
        x = tl.load(ptrs + cols, mask=mask, other=0.0).to(tl.float32)
        a, b = tl.split(tl.reshape(x, (BLOCK_S, BLOCK_H, BLOCK_N, 2)))
    else:
        cols = first + tl.arange(0, BLOCK_N)[None, None, :]
        mask = inside & (cols < HALF)
        a = tl.load(ptrs + cols, mask=mask, other=0.0).to(tl.float32)
        b = tl.load(ptrs + HALF + cols, mask=mask, other=0.0).to(tl.float32)
    return a, b


@triton.jit
def store_pairs(ptrs, inside, first, HALF, a, b, INTERLEAVED: tl.constexpr, BLOCK_N: tl.constexpr):
    dtype: tl.constexpr = ptrs.dtype.scalar.element_ty
    if INTERLEAVED:
        cols = 2 * first + tl.arange(0, 2 * BLOCK_N)[None, None, :]
        y = tl.interleave(a.to(dtype), b.to(dtype))
        tl.store(ptrs + cols, y, mask=inside & (cols < 2 * HALF))
    else:
        cols = first + tl.arange(0, BLOCK_N)[None, None, :]
        mask = inside & (cols < HALF)
        tl.store(ptrs + cols, a.to(dtype), mask=mask)
        tl.store(ptrs + HALF + cols, b.to(dtype), mask=mask)


@triton.jit
def _section_offsets(pairs, stride, end_0, end_1, HAS_SECTIONS: tl.constexpr, EIGHTS: tl.constexpr):
    # Return the offset of the table that belongs to the section of each pair.
    if HAS_SECTIONS:
        table = (pairs >= end_0).to(tl.int64) + (pairs >= end_1).to(tl.int64)
        offsets = table * stride
        if EIGHTS:
            # Eight neighbours are of one section: a thread may load its numbers as a vector.
            offsets = tl.max_constancy(offsets, [1, 1, 8])
    else:
        offsets = 0
    return offsets


@triton.jit
def _load_table(
    ptrs, inside, first, HALF, stride_n, stride_t, end_0, end_1,
    INTERLEAVED: tl.constexpr, PER_PAIR: tl.constexpr, HAS_SECTIONS: tl.constexpr,
    EIGHTS: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # Load the numbers for the two elements of BLOCK_N pairs, of each position; stride_t is from one
    # section's table to the next.
    if INTERLEAVED and not PER_PAIR:
        cols = 2 * first + tl.arange(0, 2 * BLOCK_N)[None, None, :]
        mask = inside & (cols < 2 * HALF)
        table = _section_offsets(cols // 2, stride_t, end_0, end_1, HAS_SECTIONS, EIGHTS)
        x = tl.load(ptrs + (cols * stride_n + table), mask=mask, other=0.0)
        a, b = tl.split(tl.reshape(x.to(tl.float32), (BLOCK_S, 1, BLOCK_N, 2)))
    else:
        cols = first + tl.arange(0, BLOCK_N)[None, None, :]
        mask = inside & (cols < HALF)
        table = _section_offsets(cols, stride_t, end_0, end_1, HAS_SECTIONS, EIGHTS)
        offsets = cols * stride_n + table
        a = tl.load(ptrs + offsets, mask=mask, other=0.0).to(tl.float32)
        b = a
        if not PER_PAIR:
            b = tl.load(ptrs + (offsets + HALF * stride_n), mask=mask, other=0.0).to(tl.float32)
    return a, b


@triton.jit
def _load_column(ptrs, inside, first, HALF, stride_n, stride_t, BLOCK_N: tl.constexpr):
    # Load a column of the matrices of BLOCK_N pairs; stride_t is from the first row to the second.
    cols = first + tl.arange(0, BLOCK_N)[None, None, :]
    mask = inside & (cols < HALF)
    offsets = cols * stride_n
    upper = tl.load(ptrs + offsets, mask=mask, other=0.0).to(tl.float32)
    lower = tl.load(ptrs + (offsets + stride_t), mask=mask, other=0.0).to(tl.float32)
    return upper, lower


@triton.jit
def load_tables(
    cos_ptr, sin_ptr, batch, s, S, first, HALF, SECTION_0, SECTION_1,
    cos_stride_t, cos_stride_b, cos_stride_s, cos_stride_n,
    sin_stride_t, sin_stride_b, sin_stride_s, sin_stride_n,
    INTERLEAVED: tl.constexpr, PER_PAIR: tl.constexpr, COMPLEX: tl.constexpr,
    MATRICES: tl.constexpr, HAS_SECTIONS: tl.constexpr, EIGHTS: tl.constexpr,
    BACKWARD: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # Load cos and sin for the first (a) and the second (b) elements of BLOCK_N pairs, of the
    # positions s. The rotation is y_a = a * cos_a - b * sin_a and y_b = b * cos_b + a * sin_b.
    cos_ptrs = cos_ptr + (batch * cos_stride_b + s * cos_stride_s)
    sin_ptrs = sin_ptr + (batch * sin_stride_b + s * sin_stride_s)
    if MATRICES:
        cos_a, sin_b = _load_column(
            cos_ptrs, s < S, first, HALF, cos_stride_n, cos_stride_t, BLOCK_N
        )
        minus_sin_a, cos_b = _load_column(
            sin_ptrs, s < S, first, HALF, sin_stride_n, sin_stride_t, BLOCK_N
        )
        sin_a = -minus_sin_a
    else:
        cos_a, cos_b = _load_table(
            cos_ptrs, s < S, first, HALF, cos_stride_n, cos_stride_t, SECTION_0, SECTION_1,
            INTERLEAVED, PER_PAIR, HAS_SECTIONS, EIGHTS, BLOCK_S, BLOCK_N,
        )  # fmt: skip
        if COMPLEX:
            # The real and the imaginary part lie as the elements of an interleaved pair.
            sin_a = cos_b
            sin_b = cos_b
            cos_b = cos_a
        else:
            sin_a, sin_b = _load_table(
                sin_ptrs, s < S, first, HALF, sin_stride_n, sin_stride_t, SECTION_0, SECTION_1,
                INTERLEAVED, PER_PAIR, HAS_SECTIONS, EIGHTS, BLOCK_S, BLOCK_N,
            )  # fmt: skip
    if BACKWARD:
        # The transpose of the rotation: -sin, and each element takes the sin of the other.
        swapped = sin_a
        sin_a = -sin_b
        sin_b = -swapped
    return cos_a, cos_b, sin_a, sin_b


class Tables(NamedTuple):
    """Tables of cos and sin as a kernel takes them.

    `numbers` is how many numbers a load takes for a pair, 1 or 2. `strides` are over tables, batch,
    positions and columns, of cos and of sin. `ends` are the pairs at which the second and the third
    section begin.
    """

    cos: Tensor
    sin: Tensor
    numbers: int
    ends: tuple[int, int]
    strides: tuple[int, ...]
    constants: dict[str, Any]

    def eighths(self, block: int) -> bool:
        """Return whether eight neighbouring pairs of a tile are always of one section."""
        return all(size % 8 == 0 for size in (*self.ends, block))


def tables_of(
    cos: Tensor, sin: Tensor | None, B: int, pairs: PairLayout, per_pair: bool,
    sections: list[int] | None,
) -> Tables:  # fmt: skip
    """Return the tables of a call with B samples as a kernel takes them: views of cos and sin.

    Without sin, cos has complex numbers, or matrices of 2 x 2, one for each pair.
    """
    per_pair = per_pair or sin is None
    of_matrices = holds_matrices(cos, sin)
    # Complex numbers side by side are read as the elements of interleaved pairs.
    packed = cos.is_complex() and cos.stride(-1) == 1
    if packed:
        cos = sin = torch.view_as_real(cos).flatten(-2)
    elif cos.is_complex():
        cos, sin = cos.real, cos.imag
    elif of_matrices:
        # The first column in place of cos, and the second of sin; each is two tables, of its first
        # and of its second number.
        columns = (cos if cos.dim() == 5 else cos.unsqueeze(0)).unbind(-1)
        cos, sin = (column.movedim(-1, 0) for column in columns)
    assert sin is not None
    interleaved = packed or (pairs.tables and not per_pair)
    first, second, _ = sections or (0, 0, 0)
    return Tables(
        cos, sin, 2 if interleaved else 1, (first, first + second),
        tuple(stride for x in (cos, sin) for stride in _of_batch(x, B).stride()),
        {
            "INTERLEAVED": interleaved, "PER_PAIR": per_pair and not packed, "COMPLEX": packed,
            "MATRICES": of_matrices, "HAS_SECTIONS": sections is not None,
        },
    )  # fmt: skip


def _of_batch(table: Tensor, B: int) -> Tensor:
    """Return a table, or several of equal shape, as (tables, B, S, columns)."""
    return table.expand(-1 if table.dim() == 4 else 3, B, *table.shape[-2:])
