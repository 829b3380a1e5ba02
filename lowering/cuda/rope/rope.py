"""rope: a program rotates a tile of positions, heads of q and of k, and pairs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from .... import library
from ....ops.rope.rope import pairs_of, rotated_columns
from ...common.sizes import cdiv, next_power_of_2
from ...common.tensors import unit_stride
from ..launch import WARP_SIZE, launch
from .rope_tiles import load_pairs, load_tables, store_pairs, tables_of


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
