"""The gradients of varlen_attention by this package's own kernels."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...common.tensors import cdiv, next_power_of_2, unit_stride
from ...common.triton_math import soft_cap_slope
from ..launch import launch
from .varlen_kernels import (
    LOG2E,
    Launches,
    documents_of,
    is_key_of,
    is_seen,
    keys_of_tile,
    load_rows,
    scores_of,
    store_rows,
    tile_of_program,
    without_full_tiles,
)

# Tokens of a program that computes delta.
TOKENS = 64


@triton.jit(do_not_specialize=["T"])
def _varlen_statistics_kernel(
    dy_ptr, y_ptr, lse_ptr, sinks_ptr, holes_ptr, statistics_ptr, dsinks_ptr,
    T, H, E, dy_t, dy_h, y_t, y_h,
    BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    if holes_ptr is not None:  # noqa: SIM102
        if tl.load(holes_ptr) == 0:
            return
    # lse_i to the base 2, and delta_i = dy_i . y_i; and the part of the sinks' gradient that these
    # tokens have.
    tile, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    token = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_E)
    dy = load_rows(dy_ptr + head * dy_h, token, dy_t, T, cols, E, True, False).to(tl.float32)
    y = load_rows(y_ptr + head * y_h, token, y_t, T, cols, E, True, False).to(tl.float32)
    delta = tl.sum(dy * y, 1)
    at = head * T + token
    lse = tl.load(lse_ptr + at, mask=token < T, other=0.0).to(tl.float32)
    tl.store(statistics_ptr + at, lse * LOG2E, mask=token < T)
    tl.store(statistics_ptr + (H * T.to(tl.int64) + at), delta, mask=token < T)
    if dsinks_ptr is not None:
        sink = tl.load(sinks_ptr + head).to(tl.float32)
        # Where no key is seen, lse is the sink, and y is 0. Its dy adds nothing, whatever it holds:
        # at a token of no document it may be NaN. The sink may be minus infinity.
        sees_none = (lse == sink) & (tl.sum(tl.abs(y), 1) == 0.0)
        share = tl.where(sees_none, 0.0, tl.exp2((sink - lse) * LOG2E) * delta)
        tl.store(dsinks_ptr + (tile * H + head), -tl.sum(tl.where(token < T, share, 0.0), 0))


@triton.jit
def _load_statistics(
    statistics_ptr, query, length, size, REPEAT: tl.constexpr, JOINT: tl.constexpr
):  # fmt: skip
    # lse of all tokens and heads, `size` of them, is before delta.
    if JOINT:
        # Triton loads a tensor of fewer elements than the program has threads in the layout of its
        # use, where a thread has 16 of these elements, 4 bytes each time. REPEAT makes the tensor
        # as large as the program.
        at = query[:, None, None] + tl.arange(0, 2).to(tl.int64)[None, :, None] * size
        at += tl.zeros((1, 1, REPEAT), tl.int64)
        both = tl.load(statistics_ptr + at, mask=(query < length)[:, None, None], other=0.0)
        lse, delta = tl.split(tl.max(both, 2))
    else:
        lse = tl.load(statistics_ptr + query, mask=query < length, other=0.0)
        delta = tl.load(statistics_ptr + size + query, mask=query < length, other=0.0)
    return lse, delta


@triton.jit
def _visit_keys_of_gradient(
    q, dy, lse, delta, dq, query, k_ptr, v_ptr, key_mask_ptr, k_t, v_t,
    low, high, length, keys, D, E, window_left, window_right, scale, softcap,
    MASKED: tl.constexpr, EVEN_D: tl.constexpr, EVEN_E: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    cols, value_cols = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
    for start in tl.range(low, high, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        is_key = None
        if MASKED:
            is_key = is_key_of(key_mask_ptr, key, keys)
        # A token that is no key is not read: 0 * NaN would be NaN.
        k = load_rows(k_ptr, key, k_t, keys, cols, D, MASKED, EVEN_D, is_key)
        v = load_rows(v_ptr, key, v_t, keys, value_cols, E, MASKED, EVEN_E)
        score = scores_of(tl.dot(q, tl.trans(k), input_precision=PRECISION), scale, softcap)
        dp = tl.dot(dy, tl.trans(v), input_precision=PRECISION)
        shifted = score - lse[:, None]
        if MASKED:
            seen = is_seen(query, key, is_key, length, keys, window_left, window_right, 1)
            shifted = tl.where(seen, shifted, -float("inf"))
        ds = tl.exp2(shifted) * (dp - delta[:, None])
        if softcap is not None:
            ds *= soft_cap_slope(score, softcap * LOG2E)
        if MASKED:
            # Where p is 0, p * inf would be NaN.
            ds = tl.where(seen, ds, 0.0)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    return dq


@triton.jit(do_not_specialize=["N", "T", "window_left", "window_right"])
def _varlen_query_gradient_kernel(
    dy_ptr, q_ptr, k_ptr, v_ptr, cu_ptr, lengths_ptr, key_mask_ptr, holes_ptr,
    statistics_ptr, dq_ptr,
    N, T, D, E, group, dy_t, dy_h, q_t, q_h, k_t, k_h, v_t, v_h, dq_t, dq_h,
    window_left, window_right, scale, softcap,
    ONLY_HOLES: tl.constexpr, EVEN_D: tl.constexpr, EVEN_E: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    if ONLY_HOLES:  # noqa: SIM102, because `and` would load in both cases.
        if tl.load(holes_ptr) == 0:
            return
    begin, length, keys, first = tile_of_program(cu_ptr, lengths_ptr, N, T, BLOCK_M)
    if first >= length:
        return
    head = tl.program_id(1).to(tl.int64)
    q_ptr += begin * q_t + head * q_h
    k_ptr += begin * k_t + head // group * k_h
    v_ptr += begin * v_t + head // group * v_h
    dy_ptr += begin * dy_t + head * dy_h
    query, cols = first + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    q = load_rows(q_ptr, query, q_t, length, cols, D, True, EVEN_D)
    dy = load_rows(dy_ptr, query, dy_t, length, tl.arange(0, BLOCK_E), E, True, EVEN_E)
    size = tl.num_programs(1).to(tl.int64) * T
    lse, delta = _load_statistics(
        statistics_ptr + (head * T + begin), query, length, size, 1, False
    )  # fmt: skip
    dq = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    low, full_low, full_high, high = keys_of_tile(
        first, tl.minimum(first + BLOCK_M, length), keys, window_left, window_right, BLOCK_N
    )
    if key_mask_ptr is not None:
        key_mask_ptr += begin
        full_low, full_high = without_full_tiles(holes_ptr, low, full_low, full_high)
    if window_left is not None:
        dq = _visit_keys_of_gradient(
            q, dy, lse, delta, dq, query, k_ptr, v_ptr, key_mask_ptr, k_t, v_t,
            low, full_low, length, keys, D, E, window_left, window_right, scale, softcap,
            True, EVEN_D, EVEN_E, PRECISION, BLOCK_N, BLOCK_D, BLOCK_E,
        )  # fmt: skip
    dq = _visit_keys_of_gradient(
        q, dy, lse, delta, dq, query, k_ptr, v_ptr, key_mask_ptr, k_t, v_t,
        full_low, full_high, length, keys, D, E, window_left, window_right, scale, softcap,
        False, EVEN_D, EVEN_E, PRECISION, BLOCK_N, BLOCK_D, BLOCK_E,
    )  # fmt: skip
    dq = _visit_keys_of_gradient(
        q, dy, lse, delta, dq, query, k_ptr, v_ptr, key_mask_ptr, k_t, v_t,
        full_high, high, length, keys, D, E, window_left, window_right, scale, softcap,
        True, EVEN_D, EVEN_E, PRECISION, BLOCK_N, BLOCK_D, BLOCK_E,
    )  # fmt: skip
    store_rows(dq_ptr + (begin * dq_t + head * dq_h), query, dq_t, length, cols, D, dq * scale)


@triton.jit
def _visit_queries(
    k, v, dk, dv, key, is_key, q_ptr, dy_ptr, statistics_ptr, size, q_t, dy_t,
    low, high, length, keys, D, E, window_left, window_right, scale, softcap,
    WANTS_KEY: tl.constexpr, WANTS_VALUE: tl.constexpr,
    REPEAT: tl.constexpr, JOINT: tl.constexpr,
    MASKED: tl.constexpr, EVEN_D: tl.constexpr, EVEN_E: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    # Scores are transposed: a row for each key.
    cols, value_cols = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
    for start in tl.range(low, high, BLOCK_M):
        query = start + tl.arange(0, BLOCK_M)
        q = load_rows(q_ptr, query, q_t, length, cols, D, MASKED, EVEN_D)
        dy = load_rows(dy_ptr, query, dy_t, length, value_cols, E, MASKED, EVEN_E)
        lse, delta = _load_statistics(statistics_ptr, query, length, size, REPEAT, JOINT)
        score = scores_of(tl.dot(k, tl.trans(q), input_precision=PRECISION), scale, softcap)
        if WANTS_KEY and JOINT:
            dp = tl.dot(v, tl.trans(dy), input_precision=PRECISION)
        shifted = score - lse[None, :]
        if MASKED:
            seen = is_seen(query, key, is_key, length, keys, window_left, window_right, 0)
            shifted = tl.where(seen, shifted, -float("inf"))
        p = tl.exp2(shifted)
        if WANTS_VALUE:
            dv = tl.dot(p.to(dy.dtype), dy, dv, input_precision=PRECISION)
        if WANTS_KEY:
            if not JOINT:
                dp = tl.dot(v, tl.trans(dy), input_precision=PRECISION)
            ds = p * (dp - delta[None, :])
            if softcap is not None:
                ds *= soft_cap_slope(score, softcap * LOG2E)
            if MASKED:
                ds = tl.where(seen, ds, 0.0)
            dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=["N", "T", "window_left", "window_right"])
def _varlen_key_gradient_kernel(
    dy_ptr, q_ptr, k_ptr, v_ptr, cu_ptr, lengths_ptr, key_mask_ptr, holes_ptr,
    statistics_ptr, dk_ptr, dv_ptr,
    N, T, D, E, group, dy_t, dy_h, q_t, q_h, k_t, k_h, v_t, v_h, dk_t, dk_h, dv_t, dv_h,
    window_left, window_right, scale, softcap,
    ONLY_HOLES: tl.constexpr, EVEN_D: tl.constexpr, EVEN_E: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    REPEAT: tl.constexpr, JOINT: tl.constexpr,
):  # fmt: skip
    if ONLY_HOLES:  # noqa: SIM102, because `and` would load in both cases.
        if tl.load(holes_ptr) == 0:
            return
    begin, length, keys, first = tile_of_program(cu_ptr, lengths_ptr, N, T, BLOCK_N)
    if first >= length:
        return
    key_head = tl.program_id(1).to(tl.int64)
    key, cols = first + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    value_cols = tl.arange(0, BLOCK_E)
    k = load_rows(k_ptr + (begin * k_t + key_head * k_h), key, k_t, keys, cols, D, True, EVEN_D)
    v = load_rows(
        v_ptr + (begin * v_t + key_head * v_h), key, v_t, keys, value_cols, E, True, EVEN_E
    )
    dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_E), tl.float32)
    # The queries that see one of these keys, and those tiles of them that see all.
    end = tl.minimum(first + BLOCK_N, keys)
    low = 0
    full_low = 0
    high = tl.where(first < keys, length, 0)
    seeing_all = length
    if window_right is not None:
        low = tl.maximum(first - window_right, 0)
        full_low = low + tl.cdiv(tl.maximum(end - 1 - window_right - low, 0), BLOCK_M) * BLOCK_M
    if window_left is not None:
        high = tl.minimum(high, end + window_left)
        seeing_all = tl.minimum(length, first + window_left + 1)
    full_low = tl.minimum(full_low, low + tl.cdiv(tl.maximum(high - low, 0), BLOCK_M) * BLOCK_M)
    # A tile of keys that the document does not fill has a mask for all of its queries.
    seeing_all = tl.where(first + BLOCK_N <= keys, seeing_all, 0)
    full_high = low + tl.maximum(seeing_all - low, 0) // BLOCK_M * BLOCK_M
    full_high = tl.maximum(full_high, full_low)
    if key_mask_ptr is not None:
        key_mask_ptr += begin
        full_low, full_high = without_full_tiles(holes_ptr, low, full_low, full_high)
    is_key = is_key_of(key_mask_ptr, key, keys)
    size = tl.num_programs(1).to(tl.int64) * group * T
    for i in tl.range(0, group):
        head = key_head * group + i
        q = q_ptr + (begin * q_t + head * q_h)
        dy = dy_ptr + (begin * dy_t + head * dy_h)
        statistics = statistics_ptr + (head * T + begin)
        dk, dv = _visit_queries(
            k, v, dk, dv, key, is_key, q, dy, statistics, size, q_t, dy_t,
            low, full_low, length, keys, D, E, window_left, window_right, scale, softcap,
            dk_ptr is not None, dv_ptr is not None, REPEAT, JOINT,
            True, EVEN_D, EVEN_E, PRECISION, BLOCK_M, BLOCK_D, BLOCK_E,
        )  # fmt: skip
        dk, dv = _visit_queries(
            k, v, dk, dv, key, is_key, q, dy, statistics, size, q_t, dy_t,
            full_low, full_high, length, keys, D, E, window_left, window_right, scale, softcap,
            dk_ptr is not None, dv_ptr is not None, REPEAT, JOINT,
            False, EVEN_D, EVEN_E, PRECISION, BLOCK_M, BLOCK_D, BLOCK_E,
        )  # fmt: skip
        dk, dv = _visit_queries(
            k, v, dk, dv, key, is_key, q, dy, statistics, size, q_t, dy_t,
            full_high, high, length, keys, D, E, window_left, window_right, scale, softcap,
            dk_ptr is not None, dv_ptr is not None, REPEAT, JOINT,
            True, EVEN_D, EVEN_E, PRECISION, BLOCK_M, BLOCK_D, BLOCK_E,
        )  # fmt: skip
    if dk_ptr is not None:
        dk_ptr += begin * dk_t + key_head * dk_h
        store_rows(dk_ptr, key, dk_t, length, cols, D, dk * scale)
    if dv_ptr is not None:
        dv_ptr += begin * dv_t + key_head * dv_h
        store_rows(dv_ptr, key, dv_t, length, value_cols, E, dv)


def statistics_of(call: Any, dsinks: Tensor | None, holes: Tensor | None = None) -> Tensor:
    """Return lse to the base 2 and delta, (2, H, T) in float32, and write the sinks' gradient into
    `dsinks`, if given. With `holes`, they are computed only if there are holes."""
    dy, y = unit_stride(call.dy), unit_stride(call.y)
    T, H, E = y.shape
    statistics = torch.empty(2, H, T, dtype=torch.float32, device=y.device)
    programs = cdiv(T, TOKENS)
    partial = None if dsinks is None else statistics.new_empty(programs, H)
    launch(
        _varlen_statistics_kernel, (programs, H), y,
        dy, y, call.lse.contiguous(), None if dsinks is None else call.sinks, holes, statistics,
        partial,
        T, H, E, *dy.stride()[:2], *y.stride()[:2],
        BLOCK_M=TOKENS, BLOCK_E=next_power_of_2(E), num_warps=4,
    )  # fmt: skip
    if dsinks is not None and partial is not None:
        dsinks.copy_(partial.sum(0))
    return statistics


def backward(
    call: Any, dquery: Tensor | None, dkey: Tensor | None, dvalue: Tensor | None,
    dsinks: Tensor | None, holes: Tensor | None, only_holes: bool = False,
) -> None:  # fmt: skip
    """Compute the gradients that are not None; `holes` and `only_holes` are as of `forward`."""
    launches = Launches(call)
    statistics = statistics_of(call, dsinks, holes if only_holes else None)
    strided = (unit_stride(call.dy), launches.query, launches.key, launches.value)
    tensors = (*strided, *documents_of(call), holes, statistics)
    if dquery is not None:
        launches.launch(
            "query", _varlen_query_gradient_kernel,
            (*tensors, dquery), (*strided, dquery), only_holes,
        )  # fmt: skip
    if dkey is not None or dvalue is not None:
        gradients = (dkey, dvalue)
        launches.launch(
            "key", _varlen_key_gradient_kernel,
            (*tensors, *gradients), (*strided, *gradients), only_holes,
        )  # fmt: skip
