"""rope: a program rotates a tile of positions, heads of q and of k, and pairs.

rms_norm_rope has the same tiles, (positions, heads, pairs), and the same tables as arguments.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .... import library
from ....ops.rope.rope import PairLayout, holds_matrices, pairs_of, rotated_columns
from ...common.tensors import cdiv, next_power_of_2, unit_stride
from ..launch import WARP_SIZE, launch


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


@dataclass(frozen=True)
class RopePlan:
    """A tile's positions, heads of q and k together, and pairs; and threads of a program."""

    positions: int
    heads: int
    pairs: int
    threads: int = 128


@triton.jit(do_not_specialize=["S", "SECTION_0", "SECTION_1"])
def _rope_kernel(
    q_ptr, k_ptr, cos_ptr, sin_ptr, q_out_ptr, k_out_ptr,
    S, q_heads, k_heads, HALF, COPIED, SECTION_0, SECTION_1,
    q_stride_b, q_stride_h, q_stride_s, k_stride_b, k_stride_h, k_stride_s,
    q_out_stride_b, q_out_stride_h, q_out_stride_s, k_out_stride_b, k_out_stride_h, k_out_stride_s,
    cos_stride_t, cos_stride_b, cos_stride_s, cos_stride_n,
    sin_stride_t, sin_stride_b, sin_stride_s, sin_stride_n,
    X_INTERLEAVED: tl.constexpr, Y_INTERLEAVED: tl.constexpr, INTERLEAVED: tl.constexpr,
    PER_PAIR: tl.constexpr, COMPLEX: tl.constexpr, MATRICES: tl.constexpr,
    HAS_SECTIONS: tl.constexpr, EIGHTS: tl.constexpr,
    BACKWARD: tl.constexpr, HAS_COPIED: tl.constexpr, ALIGNED: tl.constexpr,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, PAIR_TILES: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    # HALF is the number of pairs, COPIED that of the elements behind them, SECTION_0 and SECTION_1
    # the pairs at which the second and the third table begin. INTERLEAVED says how the tables are
    # read. The heads of k follow those of q, and a tile has HEADS of all of them: its loads are
    # under way together, and the tables are loaded once for all.
    program = tl.program_id(0)
    pair_tile = program % PAIR_TILES
    group = (program // PAIR_TILES) % GROUPS
    tile = program // (PAIR_TILES * GROUPS)
    tiles = tl.cdiv(S, BLOCK_S)
    first = pair_tile * BLOCK_N
    batch = (tile // tiles).to(tl.int64)
    s = ((tile % tiles).to(tl.int64) * BLOCK_S + tl.arange(0, BLOCK_S))[:, None, None]
    in_group = tl.arange(0, BLOCK_H)[None, :, None]
    head = group * HEADS + in_group
    is_q = head < q_heads
    inside = (s < S) & (in_group < HEADS) & (head < q_heads + k_heads)
    q_head = head.to(tl.int64)
    k_head = q_head - q_heads
    x_ptrs = tl.where(
        is_q,
        q_ptr + (batch * q_stride_b + s * q_stride_s + q_head * q_stride_h),
        k_ptr + (batch * k_stride_b + s * k_stride_s + k_head * k_stride_h),
    )
    y_ptrs = tl.where(
        is_q,
        q_out_ptr + (batch * q_out_stride_b + s * q_out_stride_s + q_head * q_out_stride_h),
        k_out_ptr + (batch * k_out_stride_b + s * k_out_stride_s + k_head * k_out_stride_h),
    )
    if ALIGNED:
        # Triton 3.9 does not see the alignment through tl.where, and would load element by element.
        x_ptrs = tl.multiple_of(x_ptrs, [1, 1, 16])
        y_ptrs = tl.multiple_of(y_ptrs, [1, 1, 16])
    a, b = load_pairs(x_ptrs, inside, first, HALF, X_INTERLEAVED, BLOCK_S, BLOCK_H, BLOCK_N)
    cos_a, cos_b, sin_a, sin_b = load_tables(
        cos_ptr, sin_ptr, batch, s, S, first, HALF, SECTION_0, SECTION_1,
        cos_stride_t, cos_stride_b, cos_stride_s, cos_stride_n,
        sin_stride_t, sin_stride_b, sin_stride_s, sin_stride_n,
        INTERLEAVED, PER_PAIR, COMPLEX, MATRICES, HAS_SECTIONS, EIGHTS, BACKWARD, BLOCK_S, BLOCK_N,
    )  # fmt: skip
    y_a = a * cos_a - b * sin_a
    y_b = b * cos_b + a * sin_b
    store_pairs(y_ptrs, inside, first, HALF, y_a, y_b, Y_INTERLEAVED, BLOCK_N)
    if HAS_COPIED:
        for start in range(pair_tile * BLOCK_C, COPIED, PAIR_TILES * BLOCK_C):
            cols = start + tl.arange(0, BLOCK_C)[None, None, :]
            mask = inside & (cols < COPIED)
            x = tl.load(x_ptrs + 2 * HALF + cols, mask=mask)
            tl.store(y_ptrs + 2 * HALF + cols, x, mask=mask)


def plan_tile(heads: int, half: int, itemsize: int, table_numbers: int) -> RopePlan:
    """Plan a tile. `table_numbers` is how many numbers of a table a load takes for a pair, 1 or
    2."""
    pairs = min(256, max(16, next_power_of_2(half)))
    # If a table has fewer numbers than threads, Triton loads it in the layout of q and k. Any other
    # table goes through shared memory.
    threads = max(64, 2 * table_numbers * pairs)
    most_heads = max(1, 8192 // (pairs * itemsize))
    # With interleaved or padded pairs, smaller tiles take up to 1.4 times as long.
    if table_numbers == 1 and pairs == half:
        if pairs >= 128 and itemsize == 2:
            # 8 + 4 heads of 256, 2 x 4096 positions: 0.032 ms on an H200, 0.036 with all heads of
            # a position.
            return RopePlan(positions=4, heads=512 // pairs, pairs=pairs, threads=64)
        if pairs <= 64:
            # 32 + 8 heads of 128, 4 x 4096 positions: 0.088 ms with 32 heads, 0.090 with 64.
            most_heads //= 2
            threads = max(threads, min(next_power_of_2(heads), most_heads) * pairs // 16)
    heads = min(next_power_of_2(heads), most_heads)
    positions = max(1, 4 * threads // (pairs * heads))
    return RopePlan(positions, heads, pairs, threads)


def aligned(x: Tensor) -> bool:
    """Return whether every row starts at a multiple of 16 bytes."""
    steps = [stride for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1][:-1]
    return _start(x) % 16 == 0 and all(x.element_size() * n % 16 == 0 for n in steps)


def _start(x: Tensor) -> int:
    """Return the address of x, or a number with the same alignment."""
    try:
        address = x.data_ptr()
    except RuntimeError:
        address = 0
    # While Inductor traces, there is no address, but an offset into memory that is aligned.
    return address or x.element_size() * x.storage_offset()


def rotate(
    call: Any, q: Tensor, k: Tensor, q_out: Tensor | None, k_out: Tensor | None, backward: bool,
    plan: RopePlan | None = None,
) -> None:  # fmt: skip
    """Rotate q and k, of which either is left out if its output is None, by a call's tables; for
    `backward` rotate them back."""
    B, _, S, D = q.shape
    wanted = [(x, out) for x, out in ((q, q_out), (k, k_out)) if out is not None and x.numel() > 0]
    if not wanted:
        return
    half = rotated_columns(call.cos, call.sin, call.per_pair) // 2
    heads = sum(x.shape[1] for x, _ in wanted)
    pairs = pairs_of(call.sin, call.interleaved, call.deinterleave, backward)
    tables = tables_of(call.cos, call.sin, B, pairs, call.per_pair, call.sections)
    if plan is None:
        plan = plan_tile(heads, half, q.element_size(), tables.numbers)
    groups, pair_tiles = cdiv(heads, plan.heads), cdiv(half, plan.pairs)
    copied = D - 2 * half
    # For a tensor that is not wanted, the other stands in, with 0 heads.
    tensors = [(unit_stride(x), out, x.shape[1]) for x, out in wanted]
    (q, q_out, q_heads), (k, k_out, k_heads) = (
        tensors if len(tensors) == 2 else (*tensors, (*tensors[0][:2], 0))
    )
    launch(
        _rope_kernel, (B * cdiv(S, plan.positions) * groups * pair_tiles,), q,
        q, k, tables.cos, tables.sin, q_out, k_out,
        S, q_heads, k_heads, half, copied, *tables.ends,
        *(stride for x in (q, k, q_out, k_out) for stride in x.stride()[:3]),
        *tables.strides,
        X_INTERLEAVED=pairs.x, Y_INTERLEAVED=pairs.y, **tables.constants,
        EIGHTS=tables.eighths(plan.pairs), BACKWARD=backward,
        HAS_COPIED=copied > 0, ALIGNED=all(map(aligned, (q, k, q_out, k_out))),
        HEADS=cdiv(heads, groups), GROUPS=groups, PAIR_TILES=pair_tiles, BLOCK_S=plan.positions,
        BLOCK_H=next_power_of_2(cdiv(heads, groups)), BLOCK_N=plan.pairs,
        BLOCK_C=min(2 * plan.pairs, next_power_of_2(max(1, copied))),
        num_warps=max(1, plan.threads // WARP_SIZE),
    )  # fmt: skip


@library.kernel("rope", "cuda")
def rope(call, q_out, k_out, plan):
    rotate(call, call.q, call.k, q_out, k_out, False, plan)


@library.kernel("rope_backward", "cuda")
def rope_backward(call, q_out, k_out, plan):
    rotate(call, call.dq, call.dk, q_out, k_out, True, plan)
