"""varlen_attention's own kernels: a program has a tile of a document's queries and walks the tiles
of the keys that they see, or has a tile of its keys and walks the queries that see them.

Positions are counted within the document, so that a row's sums, and their order, do not depend on
the documents around it. The programs find their documents by a search of cu_seqlens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...common.tensors import cdiv, next_power_of_2, unit_stride
from ...common.triton_math import LOWEST
from ..launch import launch, on_nvidia

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@dataclass(frozen=True)
class VarlenTiles:
    """The tiles of queries and keys: a program of the key kernel keeps BLOCK_N keys, one of the
    other kernels BLOCK_M queries."""

    BLOCK_M: int
    BLOCK_N: int
    num_warps: int
    num_stages: int


# The most columns of a head: those that `liger_ops.varlen_attention` accepts.
MOST_COLUMNS = 256
# Tokens of a program that computes delta.
TOKENS = 64


@triton.jit
def first_token(document, cu_ptr, N, T):
    # Documents are counted from the tokens before the first, number 0; those behind the last are
    # number N + 1. A bound outside of the batch is one of the batch's.
    listed = (document >= 1) & (document <= N + 1)
    bound = tl.load(cu_ptr + (document - 1), mask=listed, other=0).to(tl.int32)
    bound = tl.where(document > N + 1, T, bound)
    return tl.minimum(tl.maximum(bound, 0), T)


@triton.jit
def _tile_of_program(cu_ptr, lengths_ptr, N, T, BLOCK: tl.constexpr):
    # Document n has the programs from start // BLOCK + n on, which are enough for its tiles; the
    # last of them may have none.
    program = tl.program_id(0)
    low = 0
    high = N + 1
    while low < high:
        middle = (low + high + 1) // 2
        if first_token(middle, cu_ptr, N, T) // BLOCK + middle <= program:
            low = middle
        else:
            high = middle - 1
    start = first_token(low, cu_ptr, N, T)
    length = first_token(low + 1, cu_ptr, N, T) - start
    first = (program - (start // BLOCK + low)) * BLOCK
    keys = length
    listed = (low >= 1) & (low <= N)
    if lengths_ptr is not None:
        own = tl.load(lengths_ptr + (low - 1), mask=listed, other=0).to(tl.int32)
        keys = tl.minimum(tl.maximum(own, 0), length)
    keys = tl.where(listed, keys, 0)
    return start.to(tl.int64), length, keys, first


@triton.jit
def _load_rows(ptr, rows, stride, end, cols, D, MASKED: tl.constexpr, EVEN: tl.constexpr):
    # EVEN says that a row has as many elements as cols; rows are below `end` unless MASKED.
    at = ptr + (rows.to(tl.int64)[:, None] * stride + cols[None, :])
    if MASKED and EVEN:
        x = tl.load(at, mask=(rows < end)[:, None], other=0.0)
    elif MASKED:
        x = tl.load(at, mask=(rows < end)[:, None] & (cols < D)[None, :], other=0.0)
    elif EVEN:
        x = tl.load(at)
    else:
        x = tl.load(at, mask=(cols < D)[None, :], other=0.0)
    return x


@triton.jit
def _store_rows(ptr, rows, stride, end, cols, D, values):
    at = ptr + (rows.to(tl.int64)[:, None] * stride + cols[None, :])
    mask = (rows < end)[:, None] & (cols < D)[None, :]
    tl.store(at, values.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def _is_seen(query, key, length, keys, window_left, window_right):
    # `query` and `key` broadcast against each other.
    seen = (key < keys) & (query < length)
    if window_left is not None:
        seen = seen & (key >= query - window_left)
    if window_right is not None:
        seen = seen & (key <= query + window_right)
    return seen


@triton.jit
def _scores(products, scale, softcap):
    # To the base 2, for exp2.
    if softcap is None:
        scores = products * (scale * LOG2E)
    else:
        x = products * (scale * (2.0 / softcap))
        scores = (softcap * LOG2E) * (2.0 * tl.sigmoid(x) - 1.0)
    return scores


@triton.jit
def _slope(scores, softcap):
    # The derivative of softcap * tanh(v) is 1 - tanh(v)**2.
    capped = scores * (1.0 / (softcap * LOG2E))
    return 1.0 - capped * capped


@triton.jit
def _keys_of_tile(
    first, end, keys, window_left, window_right, BLOCK_N: tl.constexpr
):  # fmt: skip
    # Return the bounds of the keys that queries from `first` to `end` see, and of those tiles of
    # BLOCK_N keys within them that all of them see.
    low = 0
    high = keys
    seen_by_all = keys
    if window_left is not None:
        low = tl.maximum(first - window_left, 0)
    if window_right is not None:
        high = tl.minimum(keys, end + window_right)
        seen_by_all = tl.minimum(keys, first + window_right + 1)
    full_low = low
    if window_left is not None:
        hidden = tl.maximum(end - 1 - window_left - low, 0)
        tiles = tl.minimum(tl.cdiv(hidden, BLOCK_N), tl.cdiv(tl.maximum(high - low, 0), BLOCK_N))
        full_low = low + tiles * BLOCK_N
    full_high = low + tl.maximum(seen_by_all - low, 0) // BLOCK_N * BLOCK_N
    return low, full_low, tl.maximum(full_high, full_low), high


@triton.jit
def _visit_keys(
    q, maximum, total, mixed, query, k_ptr, v_ptr, k_t, v_t,
    low, high, length, keys, D, E, window_left, window_right, scale, softcap,
    MASKED: tl.constexpr, EVEN_D: tl.constexpr, EVEN_E: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    cols, value_cols = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
    for start in tl.range(low, high, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        k = _load_rows(k_ptr, key, k_t, keys, cols, D, MASKED, EVEN_D)
        score = _scores(tl.dot(q, tl.trans(k), input_precision=PRECISION), scale, softcap)
        if MASKED:
            # A row without any key so far keeps the maximum LOWEST, for which exponentials are 0.
            seen = _is_seen(query[:, None], key[None, :], length, keys, window_left, window_right)
            score = tl.where(seen, score, -float("inf"))
        higher = tl.maximum(maximum, tl.max(score, 1))
        p = tl.exp2(score - higher[:, None])
        decay = tl.exp2(maximum - higher)
        total = total * decay + tl.sum(p, 1)
        v = _load_rows(v_ptr, key, v_t, keys, value_cols, E, MASKED, EVEN_E)
        mixed = tl.dot(p.to(v.dtype), v, mixed * decay[:, None], input_precision=PRECISION)
        maximum = higher
    return maximum, total, mixed


@triton.jit(do_not_specialize=["N", "T", "window_left", "window_right"])
def _varlen_forward_kernel(
    q_ptr, k_ptr, v_ptr, cu_ptr, lengths_ptr, sinks_ptr, y_ptr, lse_ptr,
    N, T, D, E, group, q_t, q_h, k_t, k_h, v_t, v_h, y_t, y_h,
    window_left, window_right, scale, softcap,
    EVEN_D: tl.constexpr, EVEN_E: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    begin, length, keys, first = _tile_of_program(cu_ptr, lengths_ptr, N, T, BLOCK_M)
    if first >= length:
        return
    head = tl.program_id(1).to(tl.int64)
    q_ptr += begin * q_t + head * q_h
    k_ptr += begin * k_t + head // group * k_h
    v_ptr += begin * v_t + head // group * v_h
    query = first + tl.arange(0, BLOCK_M)
    q = _load_rows(q_ptr, query, q_t, length, tl.arange(0, BLOCK_D), D, True, EVEN_D)
    maximum = tl.full((BLOCK_M,), LOWEST, tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    mixed = tl.zeros((BLOCK_M, BLOCK_E), tl.float32)
    low, full_low, full_high, high = _keys_of_tile(
        first, tl.minimum(first + BLOCK_M, length), keys, window_left, window_right, BLOCK_N
    )
    if window_left is not None:
        maximum, total, mixed = _visit_keys(
            q, maximum, total, mixed, query, k_ptr, v_ptr, k_t, v_t,
            low, full_low, length, keys, D, E, window_left, window_right, scale, softcap,
            True, EVEN_D, EVEN_E, PRECISION, BLOCK_N, BLOCK_D, BLOCK_E,
        )  # fmt: skip
    maximum, total, mixed = _visit_keys(
        q, maximum, total, mixed, query, k_ptr, v_ptr, k_t, v_t,
        full_low, full_high, length, keys, D, E, window_left, window_right, scale, softcap,
        False, EVEN_D, EVEN_E, PRECISION, BLOCK_N, BLOCK_D, BLOCK_E,
    )  # fmt: skip
    maximum, total, mixed = _visit_keys(
        q, maximum, total, mixed, query, k_ptr, v_ptr, k_t, v_t,
        full_high, high, length, keys, D, E, window_left, window_right, scale, softcap,
        True, EVEN_D, EVEN_E, PRECISION, BLOCK_N, BLOCK_D, BLOCK_E,
    )  # fmt: skip
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head).to(tl.float32) * LOG2E
        higher = tl.maximum(maximum, sink)
        decay = tl.exp2(maximum - higher)
        total = total * decay + tl.exp2(sink - higher)
        mixed = mixed * decay[:, None]
        maximum = higher
    is_empty = total == 0.0
    mixed = mixed / tl.where(is_empty, 1.0, total)[:, None]
    y_ptr += begin * y_t + head * y_h
    _store_rows(y_ptr, query, y_t, length, tl.arange(0, BLOCK_E), E, mixed)
    lse = (maximum + tl.log2(tl.where(is_empty, 1.0, total))) * LN2
    lse = tl.where(is_empty, -float("inf"), lse)
    tl.store(lse_ptr + (head * T + begin + query), lse, mask=query < length)


@triton.jit(do_not_specialize=["T"])
def _varlen_delta_kernel(
    dy_ptr, y_ptr, lse_ptr, sinks_ptr, delta_ptr, dsinks_ptr,
    T, H, E, dy_t, dy_h, y_t, y_h,
    BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    # delta_i = dy_i . y_i; and the part of the sinks' gradient that these tokens have.
    tile, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    token = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_E)
    dy = _load_rows(dy_ptr + head * dy_h, token, dy_t, T, cols, E, True, False).to(tl.float32)
    y = _load_rows(y_ptr + head * y_h, token, y_t, T, cols, E, True, False).to(tl.float32)
    delta = tl.sum(dy * y, 1)
    at = head * T + token
    tl.store(delta_ptr + at, delta, mask=token < T)
    if dsinks_ptr is not None:
        lse = tl.load(lse_ptr + at, mask=token < T, other=0.0).to(tl.float32)
        sink = tl.load(sinks_ptr + head).to(tl.float32)
        share = tl.where(token < T, tl.exp2((sink - lse) * LOG2E), 0.0)
        tl.store(dsinks_ptr + (tile * H + head), -tl.sum(share * delta, 0))


@triton.jit
def _visit_keys_of_gradient(
    q, dy, lse, delta, dq, query, k_ptr, v_ptr, k_t, v_t,
    low, high, length, keys, D, E, window_left, window_right, scale, softcap,
    MASKED: tl.constexpr, EVEN_D: tl.constexpr, EVEN_E: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    cols, value_cols = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
    for start in tl.range(low, high, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        k = _load_rows(k_ptr, key, k_t, keys, cols, D, MASKED, EVEN_D)
        v = _load_rows(v_ptr, key, v_t, keys, value_cols, E, MASKED, EVEN_E)
        score = _scores(tl.dot(q, tl.trans(k), input_precision=PRECISION), scale, softcap)
        dp = tl.dot(dy, tl.trans(v), input_precision=PRECISION)
        shifted = score - lse[:, None]
        if MASKED:
            seen = _is_seen(query[:, None], key[None, :], length, keys, window_left, window_right)
            shifted = tl.where(seen, shifted, -float("inf"))
        ds = tl.exp2(shifted) * (dp - delta[:, None])
        if softcap is not None:
            ds *= _slope(score, softcap)
        if MASKED:
            # Where p is 0, p * inf would be NaN.
            ds = tl.where(seen, ds, 0.0)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    return dq


@triton.jit(do_not_specialize=["N", "T", "window_left", "window_right"])
def _varlen_query_gradient_kernel(
    dy_ptr, q_ptr, k_ptr, v_ptr, cu_ptr, lengths_ptr, lse_ptr, delta_ptr, dq_ptr,
    N, T, D, E, group, dy_t, dy_h, q_t, q_h, k_t, k_h, v_t, v_h, dq_t, dq_h,
    window_left, window_right, scale, softcap,
    EVEN_D: tl.constexpr, EVEN_E: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    begin, length, keys, first = _tile_of_program(cu_ptr, lengths_ptr, N, T, BLOCK_M)
    if first >= length:
        return
    head = tl.program_id(1).to(tl.int64)
    q_ptr += begin * q_t + head * q_h
    k_ptr += begin * k_t + head // group * k_h
    v_ptr += begin * v_t + head // group * v_h
    dy_ptr += begin * dy_t + head * dy_h
    query, cols = first + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    q = _load_rows(q_ptr, query, q_t, length, cols, D, True, EVEN_D)
    dy = _load_rows(dy_ptr, query, dy_t, length, tl.arange(0, BLOCK_E), E, True, EVEN_E)
    at = head * T + begin + query
    lse = tl.load(lse_ptr + at, mask=query < length, other=0.0) * LOG2E
    delta = tl.load(delta_ptr + at, mask=query < length, other=0.0)
    dq = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    low, full_low, full_high, high = _keys_of_tile(
        first, tl.minimum(first + BLOCK_M, length), keys, window_left, window_right, BLOCK_N
    )
    if window_left is not None:
        dq = _visit_keys_of_gradient(
            q, dy, lse, delta, dq, query, k_ptr, v_ptr, k_t, v_t,
            low, full_low, length, keys, D, E, window_left, window_right, scale, softcap,
            True, EVEN_D, EVEN_E, PRECISION, BLOCK_N, BLOCK_D, BLOCK_E,
        )  # fmt: skip
    dq = _visit_keys_of_gradient(
        q, dy, lse, delta, dq, query, k_ptr, v_ptr, k_t, v_t,
        full_low, full_high, length, keys, D, E, window_left, window_right, scale, softcap,
        False, EVEN_D, EVEN_E, PRECISION, BLOCK_N, BLOCK_D, BLOCK_E,
    )  # fmt: skip
    dq = _visit_keys_of_gradient(
        q, dy, lse, delta, dq, query, k_ptr, v_ptr, k_t, v_t,
        full_high, high, length, keys, D, E, window_left, window_right, scale, softcap,
        True, EVEN_D, EVEN_E, PRECISION, BLOCK_N, BLOCK_D, BLOCK_E,
    )  # fmt: skip
    _store_rows(dq_ptr + (begin * dq_t + head * dq_h), query, dq_t, length, cols, D, dq * scale)


@triton.jit
def _visit_queries(
    k, v, dk, dv, key, q_ptr, dy_ptr, lse_ptr, delta_ptr, q_t, dy_t,
    low, high, length, keys, D, E, window_left, window_right, scale, softcap,
    WANTS_KEY: tl.constexpr, WANTS_VALUE: tl.constexpr,
    MASKED: tl.constexpr, EVEN_D: tl.constexpr, EVEN_E: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    # Scores are transposed: a row for each key.
    cols, value_cols = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
    for start in tl.range(low, high, BLOCK_M):
        query = start + tl.arange(0, BLOCK_M)
        q = _load_rows(q_ptr, query, q_t, length, cols, D, MASKED, EVEN_D)
        dy = _load_rows(dy_ptr, query, dy_t, length, value_cols, E, MASKED, EVEN_E)
        inside = query < length
        lse = tl.load(lse_ptr + query, mask=inside, other=0.0) * LOG2E
        score = _scores(tl.dot(k, tl.trans(q), input_precision=PRECISION), scale, softcap)
        shifted = score - lse[None, :]
        if MASKED:
            seen = _is_seen(query[None, :], key[:, None], length, keys, window_left, window_right)
            shifted = tl.where(seen, shifted, -float("inf"))
        p = tl.exp2(shifted)
        if WANTS_VALUE:
            dv = tl.dot(p.to(dy.dtype), dy, dv, input_precision=PRECISION)
        if WANTS_KEY:
            delta = tl.load(delta_ptr + query, mask=inside, other=0.0)
            dp = tl.dot(v, tl.trans(dy), input_precision=PRECISION)
            ds = p * (dp - delta[None, :])
            if softcap is not None:
                ds *= _slope(score, softcap)
            if MASKED:
                ds = tl.where(seen, ds, 0.0)
            dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=["N", "T", "window_left", "window_right"])
def _varlen_key_gradient_kernel(
    dy_ptr, q_ptr, k_ptr, v_ptr, cu_ptr, lengths_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr,
    N, T, D, E, group, dy_t, dy_h, q_t, q_h, k_t, k_h, v_t, v_h, dk_t, dk_h, dv_t, dv_h,
    window_left, window_right, scale, softcap,
    EVEN_D: tl.constexpr, EVEN_E: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    begin, length, keys, first = _tile_of_program(cu_ptr, lengths_ptr, N, T, BLOCK_N)
    if first >= length:
        return
    key_head = tl.program_id(1).to(tl.int64)
    key, cols = first + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    value_cols = tl.arange(0, BLOCK_E)
    k = _load_rows(k_ptr + (begin * k_t + key_head * k_h), key, k_t, keys, cols, D, True, EVEN_D)
    v = _load_rows(
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
    for i in tl.range(0, group):
        head = key_head * group + i
        q = q_ptr + (begin * q_t + head * q_h)
        dy = dy_ptr + (begin * dy_t + head * dy_h)
        lse = lse_ptr + (head * T + begin)
        delta = delta_ptr + (head * T + begin)
        dk, dv = _visit_queries(
            k, v, dk, dv, key, q, dy, lse, delta, q_t, dy_t,
            low, full_low, length, keys, D, E, window_left, window_right, scale, softcap,
            dk_ptr is not None, dv_ptr is not None,
            True, EVEN_D, EVEN_E, PRECISION, BLOCK_M, BLOCK_D, BLOCK_E,
        )  # fmt: skip
        dk, dv = _visit_queries(
            k, v, dk, dv, key, q, dy, lse, delta, q_t, dy_t,
            full_low, full_high, length, keys, D, E, window_left, window_right, scale, softcap,
            dk_ptr is not None, dv_ptr is not None,
            False, EVEN_D, EVEN_E, PRECISION, BLOCK_M, BLOCK_D, BLOCK_E,
        )  # fmt: skip
        dk, dv = _visit_queries(
            k, v, dk, dv, key, q, dy, lse, delta, q_t, dy_t,
            full_high, high, length, keys, D, E, window_left, window_right, scale, softcap,
            dk_ptr is not None, dv_ptr is not None,
            True, EVEN_D, EVEN_E, PRECISION, BLOCK_M, BLOCK_D, BLOCK_E,
        )  # fmt: skip
    if dk_ptr is not None:
        dk_ptr += begin * dk_t + key_head * dk_h
        _store_rows(dk_ptr, key, dk_t, length, cols, D, dk * scale)
    if dv_ptr is not None:
        dv_ptr += begin * dv_t + key_head * dv_h
        _store_rows(dv_ptr, key, dv_t, length, value_cols, E, dv)


def tiles_of(kind: str, x: Tensor, D: int) -> VarlenTiles:
    """Plan the tiles of a kernel, "forward", "query" or "key", for heads of D elements.

    On an H200, 4 documents of 4096 tokens, 32 heads and 8 of keys, causal, bfloat16, ms of the
    forward, of dquery, and of dkey and dvalue: heads of 128 1.46, 1.54 and 2.99; with 128 x 64 in
    the forward 1.51; with 128 x 64 in 8 warps for the gradients 1.84 and 6.13; with 3 stages 2.20.
    Heads of 64 0.95, 1.02 and 2.14; with 128 x 64 in the forward 1.00; with 128 x 64 in 8 warps for
    the gradients 1.32 and 5.10.
    """
    if x.element_size() == 4:
        return VarlenTiles(32, 32, 4, 1)
    if D > 128:
        return VarlenTiles(64, 32, 8, 2) if kind == "forward" else VarlenTiles(32, 32, 8, 1)
    if kind == "forward":
        return VarlenTiles(128, 128, 8, 2) if D > 64 else VarlenTiles(64, 64, 4, 3)
    return VarlenTiles(64, 64, 4, 2)


class _Launches:
    """The arguments that the kernels of a call share."""

    def __init__(self, call: Any) -> None:
        self.call = call
        self.T, self.H, self.D = call.query.shape
        self.key_heads, self.E = call.value.shape[1:]
        self.documents = call.cu_seqlens.shape[0] - 1
        self.scale = self.D**-0.5 if call.scale is None else call.scale
        self.query, self.key, self.value = map(unit_stride, (call.query, call.key, call.value))
        self.cu_seqlens = call.cu_seqlens.contiguous()
        self.lengths = None if call.lengths is None else call.lengths.contiguous()
        self.window = tuple(
            None if bound < 0 else bound for bound in (call.window_left, call.window_right)
        )
        # The default of `torch.set_float32_matmul_precision` is "highest".
        exact = torch.get_float32_matmul_precision() == "highest" or not on_nvidia(self.query)
        self.precision = "ieee" if exact else "tf32"

    def launch(
        self, kind: str, kernel: Any, tensors: tuple[Tensor | None, ...],
        strided: tuple[Tensor | None, ...],
    ) -> None:  # fmt: skip
        tiles = tiles_of(kind, self.query, max(self.D, self.E))
        block, heads = (tiles.BLOCK_N, self.key_heads) if kind == "key" else (tiles.BLOCK_M, self.H)
        BLOCK_D, BLOCK_E = (next_power_of_2(max(16, columns)) for columns in (self.D, self.E))
        strides = (n for x in strided for n in ((0, 0) if x is None else x.stride()[:2]))
        launch(
            kernel, (self.T // block + self.documents + 2, heads), self.query,
            *tensors, self.documents, self.T, self.D, self.E, self.H // self.key_heads, *strides,
            *self.window, self.scale, self.call.softcap,
            EVEN_D=BLOCK_D == self.D, EVEN_E=BLOCK_E == self.E, PRECISION=self.precision,
            BLOCK_M=tiles.BLOCK_M, BLOCK_N=tiles.BLOCK_N, BLOCK_D=BLOCK_D, BLOCK_E=BLOCK_E,
            num_warps=tiles.num_warps, num_stages=tiles.num_stages,
        )  # fmt: skip


def forward(call: Any, y: Tensor, lse: Tensor) -> None:
    launches = _Launches(call)
    strided = (launches.query, launches.key, launches.value, y)
    documents = (launches.cu_seqlens, launches.lengths)
    tensors = (*strided[:3], *documents, call.sinks, y, lse)
    launches.launch("forward", _varlen_forward_kernel, tensors, strided)


def delta_of(call: Any, dsinks: Tensor | None) -> Tensor:
    """Compute delta, (H, T) in float32, and write the sinks' gradient into `dsinks`, if given."""
    dy, y = unit_stride(call.dy), unit_stride(call.y)
    T, H, E = y.shape
    delta = torch.empty(H, T, dtype=torch.float32, device=y.device)
    programs = cdiv(T, TOKENS)
    partial = None if dsinks is None else delta.new_empty(programs, H)
    launch(
        _varlen_delta_kernel, (programs, H), y,
        dy, y, call.lse.contiguous(), None if dsinks is None else call.sinks, delta, partial,
        T, H, E, *dy.stride()[:2], *y.stride()[:2],
        BLOCK_M=TOKENS, BLOCK_E=next_power_of_2(E), num_warps=4,
    )  # fmt: skip
    if dsinks is not None and partial is not None:
        dsinks.copy_(partial.sum(0))
    return delta


def backward(
    call: Any, dquery: Tensor | None, dkey: Tensor | None, dvalue: Tensor | None,
    dsinks: Tensor | None,
) -> None:  # fmt: skip
    launches, delta = _Launches(call), delta_of(call, dsinks)
    strided = (unit_stride(call.dy), launches.query, launches.key, launches.value)
    documents = (launches.cu_seqlens, launches.lengths)
    tensors = (*strided, *documents, call.lse.contiguous(), delta)
    if dquery is not None:
        launches.launch(
            "query", _varlen_query_gradient_kernel, (*tensors, dquery), (*strided, dquery)
        )
    if dkey is not None or dvalue is not None:
        gradients = (dkey, dvalue)
        launches.launch(
            "key", _varlen_key_gradient_kernel, (*tensors, *gradients), (*strided, *gradients)
        )
