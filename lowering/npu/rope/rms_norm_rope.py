"""rms_norm_rope, first of q, then of k. A work item is a tile of positions, for all heads.

A head stays in the Unified Buffer. If it does not fit, the kernels of rms_norm and rope compute it.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .... import library
from ....ops.rope.rope import pairs_of, rotated_columns
from ...common.norms.norm_math import rms_rstd, rms_scaled, rms_square
from ...common.tensors import cdiv, contiguous, next_power_of_2, unit_stride
from ...common.triton_math import rounded
from .. import tiling
from ..partial_sums import partial_sums, summed
from ..tile import load, remaining, within
from ..tiling import COSTS, Cost, Plan, launch
from .rope import Tables, load_pairs, load_tables, rotate, store_pairs, tables_of

# Costs per pair of elements, or per two of the elements after the pairs if these are more.
# 1024 pairs: 48.6% | 38.2%, 2048: 97.2% | 76.4%.
COSTS["rms_norm_rope"] = Cost({}, {2: 93.4, 4: 73.4})
# Interleaved, complex, or with sections. 512 pairs: 23.5% | 18.2%.
COSTS["rms_norm_rope_interleaved"] = Cost({}, {2: 110.1, 4: 110.1})
# 1024 pairs: 63.4% | 63.4%.
COSTS["rms_norm_rope_backward"] = Cost({}, {2: 130.1, 4: 130.1})
# 1024 pairs: 94.5%.
COSTS["rms_norm_rope_backward_interleaved"] = Cost({}, {2: 181.5, 4: 181.5})


@triton.jit(do_not_specialize=["B", "S", "SECTION_0", "SECTION_1"])
def _rms_norm_rope_kernel(
    x_ptr, weight_ptr, cos_ptr, sin_ptr, y_ptr,
    B, S, heads, HALF, COPIED, SECTION_0, SECTION_1, eps, offset,
    x_stride_b, x_stride_h, x_stride_s, y_stride_b, y_stride_h, y_stride_s,
    cos_stride_t, cos_stride_b, cos_stride_s, sin_stride_t, sin_stride_b, sin_stride_s,
    X_INTERLEAVED: tl.constexpr, Y_INTERLEAVED: tl.constexpr, INTERLEAVED: tl.constexpr,
    PER_PAIR: tl.constexpr, COMPLEX: tl.constexpr, HAS_SECTIONS: tl.constexpr,
    CASTING_MODE: tl.constexpr, BLOCK_C: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # HALF is the number of pairs, COPIED the number of elements after them. The tables of a tile of
    # positions stay in the Unified Buffer for all heads.
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    rows = tl.arange(0, BLOCK_M)[:, None]
    one = tl.arange(0, 1)[:, None] < 1
    N = 2 * HALF + COPIED
    if BLOCK_C > 0:
        rest = tl.arange(0, BLOCK_C)[None, :]
    weight_a = None
    weight_b = None
    weight_c = None
    if weight_ptr is not None:
        weight_a, weight_b = load_pairs(weight_ptr, 0, 0, one, HALF, X_INTERLEAVED, 1, BLOCK_N)
        if BLOCK_C > 0:
            weight_c = load(weight_ptr + 2 * HALF, rest, rest < COPIED)
    tiles = tl.cdiv(S, BLOCK_M)
    program = tl.program_id(0).to(tl.int64)
    for item in tl.range(program, B * tiles, tl.num_programs(0)):
        batch = item // tiles
        s = item % tiles * BLOCK_M
        row_mask = rows < remaining(S, s, BLOCK_M)
        cos_a, cos_b, sin_a, sin_b = load_tables(
            cos_ptr, sin_ptr, batch, s, 0, row_mask, HALF, SECTION_0, SECTION_1,
            cos_stride_t, cos_stride_b, cos_stride_s, sin_stride_t, sin_stride_b, sin_stride_s,
            INTERLEAVED, PER_PAIR, COMPLEX, HAS_SECTIONS, False, BLOCK_M, BLOCK_N,
        )  # fmt: skip
        x_start = batch * x_stride_b + s * x_stride_s
        y_start = batch * y_stride_b + s * y_stride_s
        for head in tl.range(0, heads):
            x_head = x_ptr + x_start + tl.cast(head, tl.int64) * x_stride_h
            y_head = y_ptr + y_start + tl.cast(head, tl.int64) * y_stride_h
            a, b = load_pairs(
                x_head, x_stride_s, 0, row_mask, HALF, X_INTERLEAVED, BLOCK_M, BLOCK_N
            )
            squares = tl.sum(rms_square(a, dtype, CASTING_MODE), axis=1)[:, None]
            squares += tl.sum(rms_square(b, dtype, CASTING_MODE), axis=1)[:, None]
            if BLOCK_C > 0:
                mask = row_mask & (rest < COPIED)
                c = load(x_head + 2 * HALF, rows * x_stride_s + rest, mask)
                squares += tl.sum(rms_square(c, dtype, CASTING_MODE), axis=1)[:, None]
            rstd = rms_rstd(squares, N, eps, dtype, CASTING_MODE)
            a = rounded(rms_scaled(a, rstd, weight_a, offset, dtype, CASTING_MODE), dtype)
            b = rounded(rms_scaled(b, rstd, weight_b, offset, dtype, CASTING_MODE), dtype)
            y_a = a * cos_a - b * sin_a
            y_b = b * cos_b + a * sin_b
            store_pairs(
                y_head, y_stride_s, 0, row_mask, HALF, y_a, y_b, Y_INTERLEAVED, BLOCK_M, BLOCK_N
            )
            if BLOCK_C > 0:
                c = rms_scaled(c, rstd, weight_c, offset, dtype, CASTING_MODE)
                tl.store(y_head + 2 * HALF + (rows * y_stride_s + rest), c.to(dtype), mask=mask)


@triton.jit(do_not_specialize=["B", "S", "SECTION_0", "SECTION_1"])
def _rms_norm_rope_backward_kernel(
    dy_ptr, x_ptr, weight_ptr, cos_ptr, sin_ptr, dx_ptr, dweight_ptr,
    B, S, heads, HALF, COPIED, SECTION_0, SECTION_1, eps, offset,
    dy_stride_b, dy_stride_h, dy_stride_s, x_stride_b, x_stride_h, x_stride_s,
    dx_stride_b, dx_stride_h, dx_stride_s,
    cos_stride_t, cos_stride_b, cos_stride_s, sin_stride_t, sin_stride_b, sin_stride_s,
    X_INTERLEAVED: tl.constexpr, Y_INTERLEAVED: tl.constexpr, INTERLEAVED: tl.constexpr,
    PER_PAIR: tl.constexpr, COMPLEX: tl.constexpr, HAS_SECTIONS: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    rows = tl.arange(0, BLOCK_M)[:, None]
    one = tl.arange(0, 1)[:, None] < 1
    N = 2 * HALF + COPIED
    if BLOCK_C > 0:
        rest = tl.arange(0, BLOCK_C)[None, :]
    if weight_ptr is not None:
        weight_a, weight_b = load_pairs(weight_ptr, 0, 0, one, HALF, X_INTERLEAVED, 1, BLOCK_N)
        if BLOCK_C > 0:
            weight_c = load(weight_ptr + 2 * HALF, rest, rest < COPIED)
        weight_a += offset
        weight_b += offset
        if BLOCK_C > 0:
            weight_c += offset
    if dweight_ptr is not None:
        sum_a = tl.zeros((1, BLOCK_N), tl.float32)
        sum_b = tl.zeros((1, BLOCK_N), tl.float32)
        if BLOCK_C > 0:
            sum_c = tl.zeros((1, BLOCK_C), tl.float32)
    tiles = tl.cdiv(S, BLOCK_M)
    program = tl.program_id(0).to(tl.int64)
    for item in tl.range(program, B * tiles, tl.num_programs(0)):
        batch = item // tiles
        s = item % tiles * BLOCK_M
        left = remaining(S, s, BLOCK_M)
        row_mask = rows < left
        cos_a, cos_b, sin_a, sin_b = load_tables(
            cos_ptr, sin_ptr, batch, s, 0, row_mask, HALF, SECTION_0, SECTION_1,
            cos_stride_t, cos_stride_b, cos_stride_s, sin_stride_t, sin_stride_b, sin_stride_s,
            INTERLEAVED, PER_PAIR, COMPLEX, HAS_SECTIONS, True, BLOCK_M, BLOCK_N,
        )  # fmt: skip
        dy_start = batch * dy_stride_b + s * dy_stride_s
        x_start = batch * x_stride_b + s * x_stride_s
        dx_start = batch * dx_stride_b + s * dx_stride_s
        for head in tl.range(0, heads):
            dy_head = dy_ptr + dy_start + tl.cast(head, tl.int64) * dy_stride_h
            x_head = x_ptr + x_start + tl.cast(head, tl.int64) * x_stride_h
            a, b = load_pairs(
                x_head, x_stride_s, 0, row_mask, HALF, X_INTERLEAVED, BLOCK_M, BLOCK_N
            )
            squares = tl.sum(a * a, axis=1)[:, None] + tl.sum(b * b, axis=1)[:, None]
            if BLOCK_C > 0:
                mask = row_mask & (rest < COPIED)
                c = load(x_head + 2 * HALF, rows * x_stride_s + rest, mask)
                squares += tl.sum(c * c, axis=1)[:, None]
            # Rows past S are zeros, which eps = 0 would turn into 0 * inf in dweight.
            rstd = tl.rsqrt(squares / N + (1.0 - within(rows, left)) + eps)
            a *= rstd
            b *= rstd
            dy_a, dy_b = load_pairs(
                dy_head, dy_stride_s, 0, row_mask, HALF, Y_INTERLEAVED, BLOCK_M, BLOCK_N
            )
            # d is the gradient of the norm's result, and g that of xhat.
            d_a = dy_a * cos_a - dy_b * sin_a
            d_b = dy_b * cos_b + dy_a * sin_b
            if dweight_ptr is not None:
                sum_a += tl.sum(d_a * a, axis=0)[None, :]
                sum_b += tl.sum(d_b * b, axis=0)[None, :]
            if weight_ptr is not None:
                d_a *= weight_a
                d_b *= weight_b
            products = tl.sum(d_a * a, axis=1)[:, None] + tl.sum(d_b * b, axis=1)[:, None]
            if BLOCK_C > 0:
                c *= rstd
                d_c = load(dy_head + 2 * HALF, rows * dy_stride_s + rest, mask)
                if dweight_ptr is not None:
                    sum_c += tl.sum(d_c * c, axis=0)[None, :]
                if weight_ptr is not None:
                    d_c *= weight_c
                products += tl.sum(d_c * c, axis=1)[:, None]
            if dx_ptr is not None:
                dx_head = dx_ptr + dx_start + tl.cast(head, tl.int64) * dx_stride_h
                projection = products / N
                store_pairs(
                    dx_head, dx_stride_s, 0, row_mask, HALF,
                    (d_a - a * projection) * rstd, (d_b - b * projection) * rstd,
                    X_INTERLEAVED, BLOCK_M, BLOCK_N,
                )  # fmt: skip
                if BLOCK_C > 0:
                    dx_c = ((d_c - c * projection) * rstd).to(dx_ptr.dtype.element_ty)
                    tl.store(dx_head + 2 * HALF + (rows * dx_stride_s + rest), dx_c, mask=mask)
    if dweight_ptr is not None:
        dweight_ptr += program * N
        store_pairs(dweight_ptr, 0, 0, one, HALF, sum_a, sum_b, X_INTERLEAVED, 1, BLOCK_N)
        if BLOCK_C > 0:
            tl.store(dweight_ptr + 2 * HALF + rest, sum_c, mask=rest < COPIED)


def plan_tile(op: str, half: int, copied: int, itemsize: int, S: int, furthest: int) -> Plan | None:
    """Choose a tile of whole heads, or return None if no head fits.

    Its positions are limited so that every core has a tile, and so that their offsets, with a
    stride of `furthest`, fit int32.
    """
    cores = tiling.vector_cores()
    elements = tiling.tile_elements(tiling.COSTS[op].wide[itemsize], tiling.ub_bytes())
    BLOCK_N = max(tiling.MIN_BLOCK_N, next_power_of_2(half))
    wider = max(BLOCK_N, _copied_block(copied) // 2)
    if elements < wider:
        return None
    BLOCK_M = min(tiling.MAX_BLOCK_M, elements // wider, next_power_of_2(cdiv(S, cores)))
    while BLOCK_M > 1 and BLOCK_M * furthest >= 2**31:
        BLOCK_M //= 2
    return Plan(BLOCK_M, BLOCK_N, cores)


def _copied_block(copied: int) -> int:
    """Return the columns of the tile for the elements after the pairs, 0 without any."""
    return max(tiling.MIN_BLOCK_N, next_power_of_2(copied)) if copied else 0


def _plan(
    call: Any, backward: bool, tables: Tables, tensors: tuple[Tensor | None, ...], plan: Plan | None
) -> Plan | None:
    if plan is not None:
        return plan
    x = tensors[0]
    assert x is not None
    B, _, S, D = x.shape
    half = rotated_columns(call.cos, call.sin, call.per_pair) // 2
    op = "rms_norm_rope_backward" if backward else "rms_norm_rope"
    op += "_interleaved" if tables.interleaved or call.sections is not None else ""
    strided = (*tensors, tables.cos, tables.sin)
    furthest = max(tensor.stride(-2) for tensor in strided if tensor is not None)
    return plan_tile(op, half, D - 2 * half, x.element_size(), B * S, furthest)


def _tables(call: Any) -> Tables:
    pairs = pairs_of(call.sin, call.interleaved, call.deinterleave, False)
    return tables_of(call.cos, call.sin, pairs, call.per_pair, call.sections)


def _sizes(call: Any, x: Tensor, tables: Tables) -> tuple[Any, ...]:
    B, heads, S, D = x.shape
    half = rotated_columns(call.cos, call.sin, call.per_pair) // 2
    return B, S, heads, half, D - 2 * half, *tables.ends, call.eps, call.offset


@library.kernel("rms_norm_rope", "npu")
def rms_norm_rope(call: Any, q_out: Tensor, k_out: Tensor, plan: Plan | None) -> None:
    tables = _tables(call)
    for x, weight, y in ((call.q, call.q_weight, q_out), (call.k, call.k_weight, k_out)):
        if x.numel() == 0:
            continue
        x, weight = unit_stride(x), contiguous(weight)
        planned = _plan(call, False, tables, (x, y), plan)
        if planned is None:
            norm = library.OPS["rms_norm"].kernels["npu"]
            xhat = norm(x, weight, call.eps, call.offset, call.casting_mode)
            rotate(call, xhat, y, backward=False)
            continue
        sizes = _sizes(call, x, tables)
        B, S, _, _, copied, *_ = sizes
        launch(
            _rms_norm_rope_kernel, planned, B * cdiv(S, planned.BLOCK_M),
            x, weight, tables.cos, tables.sin, y,
            *sizes, *x.stride()[:3], *y.stride()[:3], *tables.strides,
            **tables.constants, CASTING_MODE=call.casting_mode, BLOCK_C=_copied_block(copied),
        )  # fmt: skip


@library.kernel("rms_norm_rope_backward", "npu")
def rms_norm_rope_backward(
    call: Any, grad_q: Tensor | None, grad_k: Tensor | None,
    dq_weight: Tensor | None, dk_weight: Tensor | None, plan: Plan | None,
) -> None:  # fmt: skip
    tables = _tables(call)
    for dy, x, weight, dx, dweight in (
        (call.dq, call.q, call.q_weight, grad_q, dq_weight),
        (call.dk, call.k, call.k_weight, grad_k, dk_weight),
    ):
        if dx is None and dweight is None:
            continue
        if x.numel() == 0:
            if dweight is not None:
                dweight.zero_()
            continue
        dy, x, weight = unit_stride(dy), unit_stride(x), contiguous(weight)
        planned = _plan(call, True, tables, (x, dy, dx), plan)
        if planned is None:
            _backward_in_two_kernels(call, dy, x, weight, dx, dweight)
            continue
        sizes = _sizes(call, x, tables)
        B, S, _, _, copied, *_ = sizes
        tiles = B * cdiv(S, planned.BLOCK_M)
        partial = partial_sums(dweight, planned.programs(tiles))
        dx_strides = (0, 0, 0) if dx is None else dx.stride()[:3]
        launch(
            _rms_norm_rope_backward_kernel, planned, tiles,
            dy, x, weight, tables.cos, tables.sin, dx, partial,
            *sizes, *dy.stride()[:3], *x.stride()[:3], *dx_strides, *tables.strides,
            **tables.constants, BLOCK_C=_copied_block(copied),
        )  # fmt: skip
        summed(partial, dweight)


def _backward_in_two_kernels(
    call: Any, dy: Tensor, x: Tensor, weight: Tensor | None,
    dx: Tensor | None, dweight: Tensor | None,
) -> None:  # fmt: skip
    """Compute the gradients of heads that fit no tile: rotate dy back, then rms_norm's backward."""
    # float32, so that the gradient between the two kernels is not rounded.
    dxhat = dy.new_empty(dy.shape, dtype=torch.float32)
    rotate(call, dy, dxhat, backward=True)
    norm = library.OPS["rms_norm_backward"].kernels["npu"]
    wanted = [dx is not None, dweight is not None]
    grads = norm(dxhat, x, weight, call.eps, call.offset, wanted)
    for out, grad in zip((dx, dweight), grads, strict=True):
        if out is not None:
            out.copy_(grad)
