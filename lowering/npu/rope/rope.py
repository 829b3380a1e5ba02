"""rope, first of q, then of k. A work item is a tile of positions and pairs, for all heads.

One kernel for both would halve the tile, because each loop over heads has its own double buffers.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from .... import library
from ....ops.rope.rope import pairs_of, rotated_columns
from ...common.sizes import cdiv, next_power_of_2
from ...common.tensors import unit_stride
from .. import tiling
from ..tile import remaining
from ..tiling import COSTS, Cost, Plan, launch
from .rope_tiles import load_pairs, load_tables, store_pairs, tables_of

# Costs per pair of elements.
# 2048 pairs: 66.7% | 62.5%, with columns to copy 70.8%; 4096: 100.0% | overflow.
COSTS["rope"] = Cost({}, {2: 68.1, 4: 68.1})
# 1024 pairs: 66.7% | 64.6%, 2048: 100.0%.
COSTS["rope_sections"] = Cost({}, {2: 128.1, 4: 124.1})
# 1024 pairs: 70.8%, 2048: 100.0%.
COSTS["rope_interleaved"] = Cost({}, {2: 136.1, 4: 136.1})
# With float32 tables. 512 pairs: 52.1% | 52.1%, 1024: 100.0% | 83.3%.
COSTS["rope_interleaved_sections"] = Cost({}, {2: 200.1, 4: 160.1})


@triton.jit(do_not_specialize=["B", "S", "SECTION_0", "SECTION_1"])
def _rope_kernel(
    x_ptr, cos_ptr, sin_ptr, y_ptr,
    B, S, heads, HALF, COPIED, SECTION_0, SECTION_1,
    x_stride_b, x_stride_h, x_stride_s, y_stride_b, y_stride_h, y_stride_s,
    cos_stride_t, cos_stride_b, cos_stride_s, sin_stride_t, sin_stride_b, sin_stride_s,
    X_INTERLEAVED: tl.constexpr, Y_INTERLEAVED: tl.constexpr, INTERLEAVED: tl.constexpr,
    PER_PAIR: tl.constexpr, COMPLEX: tl.constexpr, HAS_SECTIONS: tl.constexpr,
    BACKWARD: tl.constexpr, HAS_COPIED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # HALF is the number of pairs, COPIED the number of elements after them. SECTION_0 and SECTION_1
    # are the pairs at which the second and the third table begin. INTERLEAVED says how the tables
    # are read; those of a tile of positions stay in the Unified Buffer for all heads.
    rows = tl.arange(0, BLOCK_M)[:, None]
    cols = tl.arange(0, BLOCK_N)[None, :]
    chunks = tl.cdiv(HALF, BLOCK_N)
    tiles = tl.cdiv(S, BLOCK_M)
    step = chunks * BLOCK_N
    program = tl.program_id(0).to(tl.int64)
    for item in tl.range(program, B * tiles * chunks, tl.num_programs(0)):
        first = (item % chunks) * BLOCK_N
        batch = item // chunks // tiles
        s = (item // chunks % tiles) * BLOCK_M
        row_mask = rows < remaining(S, s, BLOCK_M)
        cos_a, cos_b, sin_a, sin_b = load_tables(
            cos_ptr, sin_ptr, batch, s, first, row_mask, HALF, SECTION_0, SECTION_1,
            cos_stride_t, cos_stride_b, cos_stride_s, sin_stride_t, sin_stride_b, sin_stride_s,
            INTERLEAVED, PER_PAIR, COMPLEX, HAS_SECTIONS, BACKWARD, BLOCK_M, BLOCK_N,
        )  # fmt: skip
        x_start = batch * x_stride_b + s * x_stride_s
        y_start = batch * y_stride_b + s * y_stride_s
        for head in tl.range(0, heads):
            x_head = x_ptr + x_start + tl.cast(head, tl.int64) * x_stride_h
            y_head = y_ptr + y_start + tl.cast(head, tl.int64) * y_stride_h
            a, b = load_pairs(
                x_head, x_stride_s, first, row_mask, HALF, X_INTERLEAVED, BLOCK_M, BLOCK_N
            )
            y_a = a * cos_a - b * sin_a
            y_b = b * cos_b + a * sin_b
            store_pairs(
                y_head, y_stride_s, first, row_mask, HALF, y_a, y_b, Y_INTERLEAVED, BLOCK_M, BLOCK_N
            )
            if HAS_COPIED:
                for col in tl.range(first, COPIED, step):
                    mask = row_mask & (cols < remaining(COPIED, col, BLOCK_N))
                    start = col + 2 * HALF
                    copied = tl.load(x_head + start + (rows * x_stride_s + cols), mask=mask)
                    tl.store(y_head + start + (rows * y_stride_s + cols), copied, mask=mask)


def rotate(
    call: Any, x: Tensor, y: Tensor | None, backward: bool, plan: Plan | None = None
) -> None:
    """Write x rotated by a call's tables, or back if `backward`, into y unless that is None."""
    if y is None or y.numel() == 0:
        return
    B, heads, S, D = x.shape
    half = rotated_columns(call.cos, call.sin, call.per_pair) // 2
    pairs = pairs_of(call.sin, call.interleaved, call.deinterleave, backward)
    tables = tables_of(call.cos, call.sin, pairs, call.per_pair, call.sections)
    x = unit_stride(x)
    if plan is None:
        furthest = max(tensor.stride(-2) for tensor in (x, y, tables.cos, tables.sin))
        op = "rope_interleaved" if tables.interleaved else "rope"
        op += "" if call.sections is None else "_sections"
        plan = plan_tile(op, half, x.element_size(), B * S, furthest)
    launch(
        _rope_kernel, plan, B * cdiv(S, plan.BLOCK_M) * cdiv(half, plan.BLOCK_N),
        x, tables.cos, tables.sin, y,
        B, S, heads, half, D - 2 * half, *tables.ends,
        *x.stride()[:3], *y.stride()[:3], *tables.strides,
        **tables.constants, BACKWARD=backward, HAS_COPIED=2 * half < D,
    )  # fmt: skip


def plan_tile(op: str, pairs: int, itemsize: int, positions: int, furthest: int) -> Plan:
    """Choose the tile. Its positions are limited so that every core has a tile, and so that their
    offsets, with a stride of `furthest`, fit int32."""
    cores = tiling.vector_cores()
    elements = tiling.tile_elements(tiling.COSTS[op].wide[itemsize], tiling.ub_bytes())
    BLOCK_N = max(tiling.MIN_BLOCK_N, next_power_of_2(pairs))
    if elements < BLOCK_N:
        BLOCK_N = tiling.chunk_width(pairs, elements)
    BLOCK_M = min(
        tiling.MAX_BLOCK_M,
        max(1, elements // BLOCK_N),
        next_power_of_2(cdiv(positions, cores)),
    )
    while BLOCK_M > 1 and BLOCK_M * furthest >= 2**31:
        BLOCK_M //= 2
    return Plan(BLOCK_M, BLOCK_N, cores)


@library.kernel("rope", "npu")
def rope(call, q_out, k_out, plan):
    for x, y in ((call.q, q_out), (call.k, k_out)):
        rotate(call, x, y, False, plan)


@library.kernel("rope_backward", "npu")
def rope_backward(call, q_out, k_out, plan):
    for dy, dx in ((call.dq, q_out), (call.dk, k_out)):
        rotate(call, dy, dx, True, plan)
