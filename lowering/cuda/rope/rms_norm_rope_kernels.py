"""The kernels of rms_norm_rope. A tile is (positions, heads, pairs), and its heads are whole.

BLOCK_M is the number of heads of all positions of a tile. Of a head, a and b are the two elements
of each pair, and c the elements that are not rotated.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...common.norms.norm_math import rms_rstd, rms_scaled, rms_square
from ...common.triton_math import rounded
from .rope import load_pairs, load_tables, store_pairs


@triton.jit
def _head_offsets(strides, batch, s, head):
    return batch * strides[0] + s * strides[2] + head * strides[1]


@triton.jit
def _place(item, S, heads, BLOCK_S: tl.constexpr, BLOCK_H: tl.constexpr):
    # Return the batch, positions and heads of a tile, int64, and which of its rows exist.
    groups = tl.cdiv(heads, BLOCK_H)
    tiles = tl.cdiv(S, BLOCK_S)
    tile = item // groups
    batch = (tile // tiles).to(tl.int64)
    s = ((tile % tiles).to(tl.int64) * BLOCK_S + tl.arange(0, BLOCK_S))[:, None, None]
    head = ((item % groups).to(tl.int64) * BLOCK_H + tl.arange(0, BLOCK_H))[None, :, None]
    return batch, s, head, (s < S) & (head < heads)


@triton.jit
def _rows_sum(a, b, c):
    total = tl.sum(a + b, 2)
    if c is not None:
        total += tl.sum(c, 2)
    return total[:, :, None]


@triton.jit
def _norm_rope_tile(
    x_ptr, y_ptr, weight_ptr, cos_ptr, sin_ptr, x_strides, y_strides, table_strides,
    item, S, heads, HALF, COPIED, SECTION_0, SECTION_1, eps, offset,
    X_INTERLEAVED: tl.constexpr, Y_INTERLEAVED: tl.constexpr, INTERLEAVED: tl.constexpr,
    PER_PAIR: tl.constexpr, COMPLEX: tl.constexpr, MATRICES: tl.constexpr,
    HAS_SECTIONS: tl.constexpr, EIGHTS: tl.constexpr, CASTING_MODE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    BLOCK_S: tl.constexpr = BLOCK_M // BLOCK_H
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    batch, s, head, inside = _place(item, S, heads, BLOCK_S, BLOCK_H)
    x_ptrs = x_ptr + _head_offsets(x_strides, batch, s, head)
    y_ptrs = y_ptr + _head_offsets(y_strides, batch, s, head)
    a, b = load_pairs(x_ptrs, inside, 0, HALF, X_INTERLEAVED, BLOCK_S, BLOCK_H, BLOCK_N)
    rest = tl.arange(0, BLOCK_C)[None, None, :]
    c = None
    c_squares = None
    if BLOCK_C > 1:
        c = tl.load(x_ptrs + 2 * HALF + rest, mask=inside & (rest < COPIED), other=0.0)
        c = c.to(tl.float32)
        c_squares = rms_square(c, dtype, CASTING_MODE)
    cos_a, cos_b, sin_a, sin_b = load_tables(
        cos_ptr, sin_ptr, batch, s, S, 0, HALF, SECTION_0, SECTION_1,
        table_strides[0], table_strides[1], table_strides[2], table_strides[3],
        table_strides[4], table_strides[5], table_strides[6], table_strides[7],
        INTERLEAVED, PER_PAIR, COMPLEX, MATRICES, HAS_SECTIONS, EIGHTS, False, BLOCK_S, BLOCK_N,
    )  # fmt: skip
    squares = _rows_sum(
        rms_square(a, dtype, CASTING_MODE), rms_square(b, dtype, CASTING_MODE), c_squares
    )
    rstd = rms_rstd(squares, 2 * HALF + COPIED, eps, dtype, CASTING_MODE)
    always = tl.full((1, 1, 1), 1, tl.int1)
    weight_a = None
    weight_b = None
    weight_c = None
    if weight_ptr is not None:
        weight_a, weight_b = load_pairs(weight_ptr, always, 0, HALF, X_INTERLEAVED, 1, 1, BLOCK_N)
        if BLOCK_C > 1:
            weight_c = tl.load(weight_ptr + 2 * HALF + rest, mask=rest < COPIED, other=0.0)
            weight_c = weight_c.to(tl.float32)
    a = rounded(rms_scaled(a, rstd, weight_a, offset, dtype, CASTING_MODE), dtype)
    b = rounded(rms_scaled(b, rstd, weight_b, offset, dtype, CASTING_MODE), dtype)
    y_a = a * cos_a - b * sin_a
    y_b = b * cos_b + a * sin_b
    store_pairs(y_ptrs, inside, 0, HALF, y_a, y_b, Y_INTERLEAVED, BLOCK_N)
    if BLOCK_C > 1:
        c = rms_scaled(c, rstd, weight_c, offset, dtype, CASTING_MODE).to(dtype)
        tl.store(y_ptrs + 2 * HALF + rest, c, mask=inside & (rest < COPIED))


@triton.jit(do_not_specialize=["S", "q_items", "SECTION_0", "SECTION_1"])
def rms_norm_rope_kernel(
    q_ptr, k_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr, q_out_ptr, k_out_ptr,
    S, q_heads, k_heads, q_items, HALF, COPIED, SECTION_0, SECTION_1, eps, offset,
    q_stride_b, q_stride_h, q_stride_s, k_stride_b, k_stride_h, k_stride_s,
    q_out_stride_b, q_out_stride_h, q_out_stride_s,
    k_out_stride_b, k_out_stride_h, k_out_stride_s,
    cos_stride_t, cos_stride_b, cos_stride_s, cos_stride_n,
    sin_stride_t, sin_stride_b, sin_stride_s, sin_stride_n,
    X_INTERLEAVED: tl.constexpr, Y_INTERLEAVED: tl.constexpr, INTERLEAVED: tl.constexpr,
    PER_PAIR: tl.constexpr, COMPLEX: tl.constexpr, MATRICES: tl.constexpr,
    HAS_SECTIONS: tl.constexpr, EIGHTS: tl.constexpr, CASTING_MODE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    # HALF is the number of pairs, COPIED the number of elements after them, and SECTION_0 and
    # SECTION_1 are the pairs at which the second and the third table begin. The first q_items
    # programs have the tiles of q, and the others those of k.
    table_strides = (
        cos_stride_t, cos_stride_b, cos_stride_s, cos_stride_n,
        sin_stride_t, sin_stride_b, sin_stride_s, sin_stride_n,
    )  # fmt: skip
    q_strides = (q_stride_b, q_stride_h, q_stride_s)
    k_strides = (k_stride_b, k_stride_h, k_stride_s)
    q_out_strides = (q_out_stride_b, q_out_stride_h, q_out_stride_s)
    k_out_strides = (k_out_stride_b, k_out_stride_h, k_out_stride_s)
    program = tl.program_id(0)
    if program < q_items:
        _norm_rope_tile(
            q_ptr, q_out_ptr, q_weight_ptr, cos_ptr, sin_ptr, q_strides, q_out_strides,
            table_strides, program, S, q_heads, HALF, COPIED, SECTION_0, SECTION_1, eps, offset,
            X_INTERLEAVED, Y_INTERLEAVED, INTERLEAVED, PER_PAIR, COMPLEX, MATRICES, HAS_SECTIONS,
            EIGHTS, CASTING_MODE, BLOCK_M, BLOCK_Q, BLOCK_N, BLOCK_C,
        )  # fmt: skip
    else:
        _norm_rope_tile(
            k_ptr, k_out_ptr, k_weight_ptr, cos_ptr, sin_ptr, k_strides, k_out_strides,
            table_strides, program - q_items, S, k_heads, HALF, COPIED, SECTION_0, SECTION_1, eps,
            offset, X_INTERLEAVED, Y_INTERLEAVED, INTERLEAVED, PER_PAIR, COMPLEX, MATRICES,
            HAS_SECTIONS, EIGHTS, CASTING_MODE, BLOCK_M, BLOCK_K, BLOCK_N, BLOCK_C,
        )  # fmt: skip


@triton.jit
def _gradients_of_tiles(
    dy_ptr, x_ptr, dx_ptr, weight_ptr, dweight_ptr, cos_ptr, sin_ptr,
    dy_strides, x_strides, dx_strides, table_strides,
    program, programs, B, S, heads, HALF, COPIED, SECTION_0, SECTION_1, eps, offset,
    X_INTERLEAVED: tl.constexpr, Y_INTERLEAVED: tl.constexpr, INTERLEAVED: tl.constexpr,
    PER_PAIR: tl.constexpr, COMPLEX: tl.constexpr, MATRICES: tl.constexpr,
    HAS_SECTIONS: tl.constexpr, EIGHTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):  # fmt: skip
    # Compute the program's share of the tiles of q or of k, and of the gradient of the weight.
    BLOCK_S: tl.constexpr = BLOCK_M // BLOCK_H
    N = 2 * HALF + COPIED
    rest = tl.arange(0, BLOCK_C)[None, None, :]
    always = tl.full((1, 1, 1), 1, tl.int1)
    if weight_ptr is not None:
        weight_a, weight_b = load_pairs(weight_ptr, always, 0, HALF, X_INTERLEAVED, 1, 1, BLOCK_N)
        weight_a += offset
        weight_b += offset
        if BLOCK_C > 1:
            weight_c = tl.load(weight_ptr + 2 * HALF + rest, mask=rest < COPIED, other=0.0)
            weight_c = weight_c.to(tl.float32) + offset
    sum_a = tl.zeros((BLOCK_S, BLOCK_H, BLOCK_N), tl.float32)
    sum_b = tl.zeros((BLOCK_S, BLOCK_H, BLOCK_N), tl.float32)
    if BLOCK_C > 1:
        sum_c = tl.zeros((BLOCK_S, BLOCK_H, BLOCK_C), tl.float32)
    items = B * tl.cdiv(S, BLOCK_S) * tl.cdiv(heads, BLOCK_H)
    for item in tl.range(program, items, programs, num_stages=NUM_STAGES):
        batch, s, head, inside = _place(item, S, heads, BLOCK_S, BLOCK_H)
        dy_ptrs = dy_ptr + _head_offsets(dy_strides, batch, s, head)
        x_ptrs = x_ptr + _head_offsets(x_strides, batch, s, head)
        dy_a, dy_b = load_pairs(dy_ptrs, inside, 0, HALF, Y_INTERLEAVED, BLOCK_S, BLOCK_H, BLOCK_N)
        a, b = load_pairs(x_ptrs, inside, 0, HALF, X_INTERLEAVED, BLOCK_S, BLOCK_H, BLOCK_N)
        cos_a, cos_b, sin_a, sin_b = load_tables(
            cos_ptr, sin_ptr, batch, s, S, 0, HALF, SECTION_0, SECTION_1,
            table_strides[0], table_strides[1], table_strides[2], table_strides[3],
            table_strides[4], table_strides[5], table_strides[6], table_strides[7],
            INTERLEAVED, PER_PAIR, COMPLEX, MATRICES, HAS_SECTIONS, EIGHTS, True, BLOCK_S, BLOCK_N,
        )  # fmt: skip
        # d is the gradient of the norm's result, and g that of xhat.
        d_a = dy_a * cos_a - dy_b * sin_a
        d_b = dy_b * cos_b + dy_a * sin_b
        g_a = d_a
        g_b = d_b
        if weight_ptr is not None:
            g_a = d_a * weight_a
            g_b = d_b * weight_b
        c_squares = None
        c_products = None
        if BLOCK_C > 1:
            mask = inside & (rest < COPIED)
            c = tl.load(x_ptrs + 2 * HALF + rest, mask=mask, other=0.0).to(tl.float32)
            d_c = tl.load(dy_ptrs + 2 * HALF + rest, mask=mask, other=0.0).to(tl.float32)
            g_c = d_c
            if weight_ptr is not None:
                g_c = d_c * weight_c
            c_squares = c * c
            c_products = g_c * c
        # Rows outside are zeros, which eps = 0 would turn into 0 * inf in dweight.
        mean_square = tl.where(inside, _rows_sum(a * a, b * b, c_squares) / N, 1.0)
        rstd = tl.rsqrt(mean_square + eps)
        a *= rstd
        b *= rstd
        if dweight_ptr is not None:
            sum_a += d_a * a
            sum_b += d_b * b
        if dx_ptr is not None:
            projection = _rows_sum(g_a * a, g_b * b, None)
            if BLOCK_C > 1:
                projection += tl.sum(c_products, 2)[:, :, None] * rstd
            projection /= N
            dx_ptrs = dx_ptr + _head_offsets(dx_strides, batch, s, head)
            dx_a = rstd * (g_a - a * projection)
            dx_b = rstd * (g_b - b * projection)
            store_pairs(dx_ptrs, inside, 0, HALF, dx_a, dx_b, X_INTERLEAVED, BLOCK_N)
        if BLOCK_C > 1:
            c *= rstd
            if dweight_ptr is not None:
                sum_c += d_c * c
            if dx_ptr is not None:
                dx_c = (rstd * (g_c - c * projection)).to(dx_ptr.dtype.element_ty)
                tl.store(dx_ptrs + 2 * HALF + rest, dx_c, mask=mask)
    if dweight_ptr is not None:
        # The row of partial sums, float32, has the weight's order: its pairs are interleaved if
        # those of x are.
        dweight_ptrs = dweight_ptr + program.to(tl.int64) * N
        total_a = tl.sum(tl.sum(sum_a, 1), 0)[None, None, :]
        total_b = tl.sum(tl.sum(sum_b, 1), 0)[None, None, :]
        store_pairs(dweight_ptrs, always, 0, HALF, total_a, total_b, X_INTERLEAVED, BLOCK_N)
        if BLOCK_C > 1:
            total_c = tl.sum(tl.sum(sum_c, 1), 0)[None, None, :]
            tl.store(dweight_ptrs + 2 * HALF + rest, total_c, mask=rest < COPIED)


@triton.jit(do_not_specialize=["B", "S", "SECTION_0", "SECTION_1"])
def rms_norm_rope_backward_kernel(
    dq_ptr, dk_ptr, q_ptr, k_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr,
    grad_q_ptr, grad_k_ptr, dq_weight_ptr, dk_weight_ptr,
    B, S, q_heads, k_heads, HALF, COPIED, SECTION_0, SECTION_1, eps, offset,
    dq_stride_b, dq_stride_h, dq_stride_s, dk_stride_b, dk_stride_h, dk_stride_s,
    q_stride_b, q_stride_h, q_stride_s, k_stride_b, k_stride_h, k_stride_s,
    grad_q_stride_b, grad_q_stride_h, grad_q_stride_s,
    grad_k_stride_b, grad_k_stride_h, grad_k_stride_s,
    cos_stride_t, cos_stride_b, cos_stride_s, cos_stride_n,
    sin_stride_t, sin_stride_b, sin_stride_s, sin_stride_n,
    X_INTERLEAVED: tl.constexpr, Y_INTERLEAVED: tl.constexpr, INTERLEAVED: tl.constexpr,
    PER_PAIR: tl.constexpr, COMPLEX: tl.constexpr, MATRICES: tl.constexpr,
    HAS_SECTIONS: tl.constexpr, EIGHTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):  # fmt: skip
    # Every program takes its share of the tiles of q, then of k: it keeps the sums of one weight at
    # a time in registers.
    table_strides = (
        cos_stride_t, cos_stride_b, cos_stride_s, cos_stride_n,
        sin_stride_t, sin_stride_b, sin_stride_s, sin_stride_n,
    )  # fmt: skip
    dq_strides = (dq_stride_b, dq_stride_h, dq_stride_s)
    dk_strides = (dk_stride_b, dk_stride_h, dk_stride_s)
    q_strides = (q_stride_b, q_stride_h, q_stride_s)
    k_strides = (k_stride_b, k_stride_h, k_stride_s)
    grad_q_strides = (grad_q_stride_b, grad_q_stride_h, grad_q_stride_s)
    grad_k_strides = (grad_k_stride_b, grad_k_stride_h, grad_k_stride_s)
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    if grad_q_ptr is not None or dq_weight_ptr is not None:
        _gradients_of_tiles(
            dq_ptr, q_ptr, grad_q_ptr, q_weight_ptr, dq_weight_ptr, cos_ptr, sin_ptr,
            dq_strides, q_strides, grad_q_strides, table_strides,
            program, programs, B, S, q_heads, HALF, COPIED, SECTION_0, SECTION_1, eps, offset,
            X_INTERLEAVED, Y_INTERLEAVED, INTERLEAVED, PER_PAIR, COMPLEX, MATRICES, HAS_SECTIONS,
            EIGHTS, BLOCK_M, BLOCK_Q, BLOCK_N, BLOCK_C, NUM_STAGES,
        )  # fmt: skip
    if grad_k_ptr is not None or dk_weight_ptr is not None:
        # In the opposite order: the last programs have one tile of q less, and come first for k.
        _gradients_of_tiles(
            dk_ptr, k_ptr, grad_k_ptr, k_weight_ptr, dk_weight_ptr, cos_ptr, sin_ptr,
            dk_strides, k_strides, grad_k_strides, table_strides,
            programs - 1 - program, programs, B, S, k_heads, HALF, COPIED, SECTION_0, SECTION_1,
            eps, offset,
            X_INTERLEAVED, Y_INTERLEAVED, INTERLEAVED, PER_PAIR, COMPLEX, MATRICES, HAS_SECTIONS,
            EIGHTS, BLOCK_M, BLOCK_K, BLOCK_N, BLOCK_C, NUM_STAGES,
        )  # fmt: skip
