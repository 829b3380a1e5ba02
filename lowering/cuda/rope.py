"""rope: a program rotates some positions, in a chunk of the pairs, of every head of q and of k."""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from ... import library, meta
from ..sizes import cdiv, next_power_of_2
from .launch import WARP_SIZE, launch


@dataclass(frozen=True)
class RopePlan:
    """A tile: positions, heads at once, pairs; and threads a program."""

    positions: int
    heads: int
    pairs: int
    threads: int = 128


@triton.jit
def _load_pairs(
    ptr,
    rows,
    inside,
    first,
    HALF,
    INTERLEAVED: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    # The two elements of BLOCK_N pairs from the pair `first` on, of each row.
    if INTERLEAVED:
        cols = 2 * first + tl.arange(0, 2 * BLOCK_N)[None, None, :]
        mask = inside & (cols < 2 * HALF)
        x = tl.load(ptr + rows + cols, mask=mask, other=0.0).to(tl.float32)
        a, b = tl.split(tl.reshape(x, (BLOCK_S, BLOCK_H, BLOCK_N, 2)))
    else:
        cols = first + tl.arange(0, BLOCK_N)[None, None, :]
        mask = inside & (cols < HALF)
        a = tl.load(ptr + rows + cols, mask=mask, other=0.0).to(tl.float32)
        b = tl.load(ptr + rows + cols + HALF, mask=mask, other=0.0).to(tl.float32)
    return a, b


@triton.jit
def _store_pairs(
    ptr, rows, inside, first, HALF, a, b, INTERLEAVED: tl.constexpr, BLOCK_N: tl.constexpr
):
    dtype: tl.constexpr = ptr.dtype.element_ty
    if INTERLEAVED:
        cols = 2 * first + tl.arange(0, 2 * BLOCK_N)[None, None, :]
        y = tl.interleave(a, b).to(dtype)
        tl.store(ptr + rows + cols, y, mask=inside & (cols < 2 * HALF))
    else:
        cols = first + tl.arange(0, BLOCK_N)[None, None, :]
        mask = inside & (cols < HALF)
        tl.store(ptr + rows + cols, a.to(dtype), mask=mask)
        tl.store(ptr + rows + cols + HALF, b.to(dtype), mask=mask)


@triton.jit
def _rotate(
    x_ptr,
    y_ptr,
    x_start,
    y_start,
    stride_x,
    stride_y,
    heads,
    inside,
    first,
    step,
    HALF,
    COPIED,
    cos_a,
    cos_b,
    sin_a,
    sin_b,
    INTERLEAVED: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    # The strides are from head to head.
    for start in range(0, heads, BLOCK_H):
        head = (start + tl.arange(0, BLOCK_H).to(tl.int64))[None, :, None]
        mask = inside & (head < heads)
        x_rows = x_start + head * stride_x
        y_rows = y_start + head * stride_y
        a, b = _load_pairs(x_ptr, x_rows, mask, first, HALF, INTERLEAVED, BLOCK_S, BLOCK_H, BLOCK_N)
        y_a = a * cos_a - b * sin_a
        y_b = b * cos_b + a * sin_b
        _store_pairs(y_ptr, y_rows, mask, first, HALF, y_a, y_b, INTERLEAVED, BLOCK_N)
        for col in range(first, COPIED, step):
            cols = col + tl.arange(0, BLOCK_N)[None, None, :]
            offsets = 2 * HALF + cols
            copied = mask & (cols < COPIED)
            x = tl.load(x_ptr + x_rows + offsets, mask=copied)
            tl.store(y_ptr + y_rows + offsets, x, mask=copied)


@triton.jit(do_not_specialize=["S"])
def _rope_kernel(
    q_ptr,
    k_ptr,
    cos_ptr,
    sin_ptr,
    q_out_ptr,
    k_out_ptr,
    S,
    q_heads,
    k_heads,
    HALF,
    COPIED,
    q_stride_b,
    q_stride_h,
    q_stride_s,
    k_stride_b,
    k_stride_h,
    k_stride_s,
    cos_stride_b,
    cos_stride_s,
    sin_stride_b,
    sin_stride_s,
    q_out_stride_b,
    q_out_stride_h,
    q_out_stride_s,
    k_out_stride_b,
    k_out_stride_h,
    k_out_stride_s,
    INTERLEAVED: tl.constexpr,
    BACKWARD: tl.constexpr,
    NEEDS_Q: tl.constexpr,
    NEEDS_K: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    # HALF is the number of pairs, COPIED that of the elements behind them. BLOCK_Q and BLOCK_K are
    # heads. The tables of the positions are loaded once for all heads.
    program = tl.program_id(0)
    chunks = tl.cdiv(HALF, BLOCK_N)
    tiles = tl.cdiv(S, BLOCK_S)
    first = (program % chunks) * BLOCK_N
    step = chunks * BLOCK_N
    tile = program // chunks
    batch = (tile // tiles).to(tl.int64)
    s = ((tile % tiles).to(tl.int64) * BLOCK_S + tl.arange(0, BLOCK_S))[:, None, None]
    inside = s < S
    cos_a, cos_b = _load_pairs(
        cos_ptr,
        batch * cos_stride_b + s * cos_stride_s,
        inside,
        first,
        HALF,
        INTERLEAVED,
        BLOCK_S,
        1,
        BLOCK_N,
    )
    sin_a, sin_b = _load_pairs(
        sin_ptr,
        batch * sin_stride_b + s * sin_stride_s,
        inside,
        first,
        HALF,
        INTERLEAVED,
        BLOCK_S,
        1,
        BLOCK_N,
    )
    if BACKWARD:
        # The transpose of the rotation: that by -sin, of each other's element of the pair.
        swapped = sin_a
        sin_a = -sin_b
        sin_b = -swapped
    if NEEDS_Q:
        _rotate(
            q_ptr,
            q_out_ptr,
            batch * q_stride_b + s * q_stride_s,
            batch * q_out_stride_b + s * q_out_stride_s,
            q_stride_h,
            q_out_stride_h,
            q_heads,
            inside,
            first,
            step,
            HALF,
            COPIED,
            cos_a,
            cos_b,
            sin_a,
            sin_b,
            INTERLEAVED,
            BLOCK_S,
            BLOCK_Q,
            BLOCK_N,
        )
    if NEEDS_K:
        _rotate(
            k_ptr,
            k_out_ptr,
            batch * k_stride_b + s * k_stride_s,
            batch * k_out_stride_b + s * k_out_stride_s,
            k_stride_h,
            k_out_stride_h,
            k_heads,
            inside,
            first,
            step,
            HALF,
            COPIED,
            cos_a,
            cos_b,
            sin_a,
            sin_b,
            INTERLEAVED,
            BLOCK_S,
            BLOCK_K,
            BLOCK_N,
        )


def plan_tile(heads: int, half: int) -> RopePlan:
    pairs = min(2048, max(16, next_power_of_2(half)))
    at_once = min(next_power_of_2(max(1, heads)), max(1, 2048 // pairs))
    # Of 2048 pairs over several positions a thread of sm_90 takes 233 registers; over one, 96.
    return RopePlan(max(1, 1024 // (pairs * at_once)), at_once, pairs)


def unit_stride(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def rotate(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_out: Tensor | None,
    k_out: Tensor | None,
    interleaved: bool,
    backward: bool,
    plan: RopePlan | None,
) -> None:
    """Launch the rotation, or for backward the rotation back, of what has an output."""
    B, _, S, D = q.shape
    given = [(x, out) for x, out in ((q, q_out), (k, k_out)) if out is not None and x.numel() > 0]
    if not given:
        return
    R = cos.shape[-1]
    plan = plan or plan_tile(max(x.shape[1] for x, _ in given), R // 2)
    q, k, cos, sin = map(unit_stride, (q, k, cos, sin))
    cos, sin = cos.expand(B, S, R), sin.expand(B, S, R)
    strides = [
        stride
        for x in (q, k, cos, sin, q if q_out is None else q_out, k if k_out is None else k_out)
        for stride in x.stride()[:-1]
    ]
    launch(
        _rope_kernel,
        (B * cdiv(S, plan.positions) * cdiv(R // 2, plan.pairs),),
        q,
        q,
        k,
        cos,
        sin,
        q_out,
        k_out,
        S,
        q.shape[1],
        k.shape[1],
        R // 2,
        D - R,
        *strides,
        INTERLEAVED=interleaved,
        BACKWARD=backward,
        NEEDS_Q=q_out is not None,
        NEEDS_K=k_out is not None,
        BLOCK_S=plan.positions,
        BLOCK_Q=min(plan.heads, next_power_of_2(max(1, q.shape[1]))),
        BLOCK_K=min(plan.heads, next_power_of_2(max(1, k.shape[1]))),
        BLOCK_N=plan.pairs,
        num_warps=max(1, plan.threads // WARP_SIZE),
    )


@library.kernel("rope", "cuda")
def rope(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    *,
    plan: RopePlan | None = None,
) -> tuple[Tensor, Tensor]:
    q_out, k_out = meta.rope.rope(q, k, cos, sin, interleaved)
    rotate(q, k, cos, sin, q_out, k_out, interleaved, False, plan)
    return q_out, k_out


@library.kernel("rope_backward", "cuda")
def rope_backward(
    dq: Tensor,
    dk: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    output_mask: list[bool],
    *,
    plan: RopePlan | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    q_out, k_out = meta.rope.rope_backward(dq, dk, cos, sin, interleaved, output_mask)
    rotate(dq, dk, cos, sin, q_out, k_out, interleaved, True, plan)
    return q_out, k_out
