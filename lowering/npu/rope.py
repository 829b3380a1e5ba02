"""rope, of q and then of k: an item of work is a tile of positions and pairs, in every head.

Both in one kernel would halve the tile: each loop over heads has its own pairs of buffers.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ... import library, meta
from ..sizes import cdiv, next_power_of_2
from . import tiling
from .tile import load, remaining
from .tiling import Plan, launch


@triton.jit
def _load_pairs(
    ptr,
    stride,
    first,
    row_mask,
    HALF,
    INTERLEAVED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The two elements of BLOCK_N pairs from the pair `first` on, in rows a stride apart."""
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
def _store_pairs(
    ptr,
    stride,
    first,
    row_mask,
    HALF,
    a,
    b,
    INTERLEAVED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
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


@triton.jit(do_not_specialize=["B", "S"])
def _rope_kernel(
    x_ptr,
    cos_ptr,
    sin_ptr,
    y_ptr,
    B,
    S,
    heads,
    HALF,
    COPIED,
    x_stride_b,
    x_stride_h,
    x_stride_s,
    y_stride_b,
    y_stride_h,
    y_stride_s,
    cos_stride_b,
    cos_stride_s,
    sin_stride_b,
    sin_stride_s,
    INTERLEAVED: tl.constexpr,
    BACKWARD: tl.constexpr,
    HAS_COPIED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    # HALF is the number of pairs, COPIED that of the elements behind them. The tables of a tile of
    # positions stay in the Unified Buffer for all heads.
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
        cos_a, cos_b = _load_pairs(
            cos_ptr + batch * cos_stride_b + s * cos_stride_s,
            cos_stride_s,
            first,
            row_mask,
            HALF,
            INTERLEAVED,
            BLOCK_M,
            BLOCK_N,
        )
        sin_a, sin_b = _load_pairs(
            sin_ptr + batch * sin_stride_b + s * sin_stride_s,
            sin_stride_s,
            first,
            row_mask,
            HALF,
            INTERLEAVED,
            BLOCK_M,
            BLOCK_N,
        )
        if BACKWARD:
            # The transpose of the rotation: that by -sin, of each other's element of the pair.
            swapped = sin_a
            sin_a = -sin_b
            sin_b = -swapped
        x_start = batch * x_stride_b + s * x_stride_s
        y_start = batch * y_stride_b + s * y_stride_s
        for head in tl.range(0, heads):
            x_head = x_ptr + x_start + tl.cast(head, tl.int64) * x_stride_h
            y_head = y_ptr + y_start + tl.cast(head, tl.int64) * y_stride_h
            a, b = _load_pairs(
                x_head, x_stride_s, first, row_mask, HALF, INTERLEAVED, BLOCK_M, BLOCK_N
            )
            y_a = a * cos_a - b * sin_a
            y_b = b * cos_b + a * sin_b
            _store_pairs(
                y_head, y_stride_s, first, row_mask, HALF, y_a, y_b, INTERLEAVED, BLOCK_M, BLOCK_N
            )
            if HAS_COPIED:
                for col in tl.range(first, COPIED, step):
                    mask = row_mask & (cols < remaining(COPIED, col, BLOCK_N))
                    start = col + 2 * HALF
                    copied = tl.load(x_head + start + (rows * x_stride_s + cols), mask=mask)
                    tl.store(y_head + start + (rows * y_stride_s + cols), copied, mask=mask)


def unit_stride(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def rotate(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    y: Tensor | None,
    interleaved: bool,
    backward: bool,
    plan: Plan | None,
) -> None:
    """Launch the rotation of x, or for backward the rotation back, into y if there is one."""
    if y is None or y.numel() == 0:
        return
    B, heads, S, D = x.shape
    R = cos.shape[-1]
    x, cos, sin = map(unit_stride, (x, cos, sin))
    cos, sin = cos.expand(B, S, R), sin.expand(B, S, R)
    if plan is None:
        furthest = max(tensor.stride(-2) for tensor in (x, y, cos, sin))
        op = "rope_interleaved" if interleaved else "rope"
        plan = plan_tile(op, R // 2, x.element_size(), B * S, furthest)
    launch(
        _rope_kernel,
        plan,
        B * cdiv(S, plan.BLOCK_M) * cdiv(R // 2, plan.BLOCK_N),
        x,
        cos,
        sin,
        y,
        B,
        S,
        heads,
        R // 2,
        D - R,
        *x.stride()[:3],
        *y.stride()[:3],
        *cos.stride()[:2],
        *sin.stride()[:2],
        INTERLEAVED=interleaved,
        BACKWARD=backward,
        HAS_COPIED=D > R,
    )


def plan_tile(op: str, pairs: int, itemsize: int, positions: int, furthest: int) -> Plan:
    """A tile of no more positions than give every core one, and than lie, `furthest` apart, within
    int32 offsets of each other."""
    cores = tiling.vector_cores()
    elements = tiling.tile_elements(tiling.COSTS[op].wide[itemsize], tiling.ub_bytes())
    BLOCK_N = max(tiling.MIN_BLOCK_N, next_power_of_2(pairs))
    if elements < BLOCK_N:
        BLOCK_N = tiling.chunk(pairs, elements)
    BLOCK_M = min(
        tiling.MAX_BLOCK_M,
        max(1, elements // BLOCK_N),
        next_power_of_2(cdiv(positions, cores)),
    )
    while BLOCK_M > 1 and BLOCK_M * furthest >= 2**31:
        BLOCK_M //= 2
    return Plan(BLOCK_M, BLOCK_N, cores)


@library.kernel("rope", "npu")
def rope(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    *,
    plan: Plan | None = None,
) -> tuple[Tensor, Tensor]:
    q_out, k_out = meta.rope.rope(q, k, cos, sin, interleaved)
    rotate(q, cos, sin, q_out, interleaved, False, plan)
    rotate(k, cos, sin, k_out, interleaved, False, plan)
    return q_out, k_out


@library.kernel("rope_backward", "npu")
def rope_backward(
    dq: Tensor,
    dk: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    output_mask: list[bool],
    *,
    plan: Plan | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    q_out, k_out = meta.rope.rope_backward(dq, dk, cos, sin, interleaved, output_mask)
    rotate(dq, cos, sin, q_out, interleaved, True, plan)
    rotate(dk, cos, sin, k_out, interleaved, True, plan)
    return q_out, k_out
