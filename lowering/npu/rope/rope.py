"""rope, first of q, then of k. A work item is a tile of positions and pairs, for all heads.

One kernel for both would halve the tile, because each loop over heads has its own double buffers.
rms_norm_rope has the same tiles, and the same tables as arguments.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .... import library
from ....ops.rope.rope import PairLayout, holds_matrices, pairs_of, rotated_columns
from ...common.tensors import cdiv, next_power_of_2, unit_stride
from .. import tiling
from ..tile import load, remaining
from ..tiling import COSTS, Cost, Plan, launch


@triton.jit
def load_pairs(
    ptr, stride, first, row_mask, HALF,
    INTERLEAVED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Load the two elements of BLOCK_N pairs from the pair `first` on; rows are `stride` apart."""
    rows = tl.arange(0, BLOCK_M)[:, None] * stride
    if INTERLEAVED:
        cols = tl.arange(0, 2 * BLOCK_N)[None, :]
        mask = row_mask & (cols < 2 * remaining(HALF, first, BLOCK_N))
        x = load(ptr + 2 * first, rows + cols, mask)
        a, b = tl.split(tl.reshape(x, (BLOCK_M, BLOCK_N, 2)))
    else:
        cols = tl.arange(0, BLOCK_N)[None, :]
        mask = row_mask & (cols < remaining(HALF, first, BLOCK_N))
        a = load(ptr + first, rows + cols, mask)
        b = load(ptr + first + HALF, rows + cols, mask)
    return a, b


@triton.jit
def _load_columns(
    ptr, rows, row_mask, cols, first, size, end_0, end_1, stride_t,
    HAS_SECTIONS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Load columns of a table from `first` on; with sections, the columns before end_0 are from the
    first table, those before end_1 from the second and the others from the third.

    Each load is of a range of columns: if the table were chosen per column, every element would be
    loaded separately. triton-ascend 3.2.0 crashes if a range's lower end is masked first.
    """
    stop = tl.maximum(remaining(size, first, BLOCK), 0)
    if HAS_SECTIONS:
        stop_0 = tl.maximum(remaining(end_0, first, BLOCK), 0)
        stop_1 = tl.maximum(remaining(end_1, first, BLOCK), 0)
        ptr += first
        x = load(ptr, rows + cols, row_mask & (cols < stop_0))
        x += load(ptr + stride_t, rows + cols, row_mask & (cols < stop_1) & (cols >= stop_0))
        x += load(ptr + 2 * stride_t, rows + cols, row_mask & (cols < stop) & (cols >= stop_1))
    else:
        x = load(ptr + first, rows + cols, row_mask & (cols < stop))
    return x


@triton.jit
def _load_table(
    ptr, stride, first, row_mask, HALF, SECTION_0, SECTION_1, stride_t,
    INTERLEAVED: tl.constexpr, PER_PAIR: tl.constexpr, HAS_SECTIONS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Load a table's numbers for both elements of BLOCK_N pairs from the pair `first` on."""
    rows = tl.arange(0, BLOCK_M)[:, None] * stride
    if INTERLEAVED and not PER_PAIR:
        x = _load_columns(
            ptr, rows, row_mask, tl.arange(0, 2 * BLOCK_N)[None, :],
            2 * first, 2 * HALF, 2 * SECTION_0, 2 * SECTION_1, stride_t,
            HAS_SECTIONS, 2 * BLOCK_N,
        )  # fmt: skip
        a, b = tl.split(tl.reshape(x, (BLOCK_M, BLOCK_N, 2)))
    else:
        cols = tl.arange(0, BLOCK_N)[None, :]
        a = _load_columns(
            ptr, rows, row_mask, cols, first, HALF, SECTION_0, SECTION_1, stride_t,
            HAS_SECTIONS, BLOCK_N,
        )  # fmt: skip
        b = a
        if not PER_PAIR:
            b = _load_columns(
                ptr + HALF, rows, row_mask, cols, first, HALF, SECTION_0, SECTION_1, stride_t,
                HAS_SECTIONS, BLOCK_N,
            )  # fmt: skip
    return a, b


@triton.jit
def store_pairs(
    ptr, stride, first, row_mask, HALF, a, b,
    INTERLEAVED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Store the two elements of BLOCK_N pairs from the pair `first` on."""
    dtype: tl.constexpr = ptr.dtype.element_ty
    rows = tl.arange(0, BLOCK_M)[:, None] * stride
    if INTERLEAVED:
        cols = tl.arange(0, 2 * BLOCK_N)[None, :]
        mask = row_mask & (cols < 2 * remaining(HALF, first, BLOCK_N))
        tl.store(ptr + 2 * first + (rows + cols), tl.interleave(a, b).to(dtype), mask=mask)
    else:
        cols = tl.arange(0, BLOCK_N)[None, :]
        mask = row_mask & (cols < remaining(HALF, first, BLOCK_N))
        tl.store(ptr + first + (rows + cols), a.to(dtype), mask=mask)
        tl.store(ptr + first + HALF + (rows + cols), b.to(dtype), mask=mask)


@triton.jit
def load_tables(
    cos_ptr, sin_ptr, batch, s, first, row_mask, HALF, SECTION_0, SECTION_1,
    cos_stride_t, cos_stride_b, cos_stride_s, sin_stride_t, sin_stride_b, sin_stride_s,
    INTERLEAVED: tl.constexpr, PER_PAIR: tl.constexpr, COMPLEX: tl.constexpr,
    HAS_SECTIONS: tl.constexpr, BACKWARD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Load cos and sin for both elements of BLOCK_N pairs, at BLOCK_M positions from s on."""
    cos_a, cos_b = _load_table(
        cos_ptr + batch * cos_stride_b + s * cos_stride_s, cos_stride_s,
        first, row_mask, HALF, SECTION_0, SECTION_1, cos_stride_t,
        INTERLEAVED, PER_PAIR, HAS_SECTIONS, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    if COMPLEX:
        # The real and the imaginary part are adjacent, like elements of an interleaved pair.
        sin_a = cos_b
        sin_b = cos_b
        cos_b = cos_a
    else:
        sin_a, sin_b = _load_table(
            sin_ptr + batch * sin_stride_b + s * sin_stride_s, sin_stride_s,
            first, row_mask, HALF, SECTION_0, SECTION_1, sin_stride_t,
            INTERLEAVED, PER_PAIR, HAS_SECTIONS, BLOCK_M, BLOCK_N,
        )  # fmt: skip
    if BACKWARD:
        # The transpose of the rotation: -sin, with the numbers of a pair's elements swapped.
        swapped = sin_a
        sin_a = -sin_b
        sin_b = -swapped
    return cos_a, cos_b, sin_a, sin_b


def _table_strides(table: Tensor) -> list[int]:
    """Return a table's strides over sections, batch and positions, 0 for a dimension of size 1."""
    strides = [
        0 if size == 1 else stride
        for size, stride in zip(table.shape[:-1], table.stride()[:-1], strict=True)
    ]
    return [0] * (3 - len(strides)) + strides


def _interleaved_tables(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Return tables of cos and sin, for elements of interleaved pairs, from a matrix for each pair.

    A kernel would load a matrix of the pair number by number.
    """
    cos = torch.stack((matrices[..., 0, 0], matrices[..., 1, 1]), -1)
    sin = torch.stack((-matrices[..., 0, 1], matrices[..., 1, 0]), -1)
    return cos.flatten(-2), sin.flatten(-2)


class Tables(NamedTuple):
    """Tables of cos and sin as a kernel takes them.

    ends: The pairs at which the first and the second section end.
    strides: Those of cos, then of sin, over sections, batch and positions.
    interleaved: Whether x, y or the tables have interleaved pairs.
    constants: The constexpr arguments for the tables.
    """

    cos: Tensor
    sin: Tensor
    ends: tuple[int, int]
    strides: tuple[int, ...]
    interleaved: bool
    constants: dict[str, Any]


def tables_of(
    cos: Tensor, sin: Tensor | None, pairs: PairLayout, per_pair: bool, sections: list[int] | None
) -> Tables:
    """Return the tables of a call, in a form that the kernels read in vectors."""
    # Whether the tables have a number for each element of interleaved pairs.
    interleaved = sin is None or (pairs.tables and not per_pair)
    is_complex = cos.is_complex()
    if is_complex:
        cos = sin = torch.view_as_real(unit_stride(cos)).flatten(-2)
    elif holds_matrices(cos, sin):
        cos, sin = _interleaved_tables(cos)
    assert sin is not None
    cos, sin = map(unit_stride, (cos, sin))
    first, second, _ = sections or (0, 0, 0)
    return Tables(
        cos, sin, (first, first + second), (*_table_strides(cos), *_table_strides(sin)),
        any((*pairs[:2], interleaved)),
        {
            "X_INTERLEAVED": pairs.x, "Y_INTERLEAVED": pairs.y, "INTERLEAVED": interleaved,
            "PER_PAIR": per_pair and not interleaved, "COMPLEX": is_complex,
            "HAS_SECTIONS": sections is not None,
        },
    )  # fmt: skip


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
