"""Complete the results of another engine for varlen_attention: rows without a result, sinks,
documents longer than max_seqlen, and the holes of a mask."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...common.tensors import cdiv, next_power_of_2
from ..launch import launch
from .varlen_kernels import LN2, LOG2E, documents_of, first_token

# Tokens of a program.
TOKENS = 64


@triton.jit
def _without_result(token, cu_ptr, lengths_ptr, N, T, window_left, OF_KEYS: tl.constexpr):
    # Return which tokens engines leave out: those of no document and, with lengths, queries that
    # see no key, or tokens that are not keys.
    outside = (token < tl.load(cu_ptr)) | (token >= tl.load(cu_ptr + N))
    if lengths_ptr is not None:
        low = tl.zeros_like(token)
        high = tl.zeros_like(token) + (N + 1)
        size = N + 2
        while size > 0:
            middle = (low + high + 1) // 2
            is_before = first_token(middle, cu_ptr, N, T) <= token
            low = tl.where(is_before, middle, low)
            high = tl.where(is_before, high, middle - 1)
            size = size // 2
        listed = (low >= 1) & (low <= N)
        keys = tl.load(lengths_ptr + (low - 1), mask=listed, other=0).to(tl.int32)
        # The token's own place in its document, or that of the first key that it sees.
        position = token - first_token(low, cu_ptr, N, T)
        if not OF_KEYS:
            if window_left is None:
                position = 0
            else:
                position = tl.maximum(position - window_left, 0)
        outside = outside | (position >= keys)
    return outside


@triton.jit(do_not_specialize=["N", "T"])
def _varlen_holes_kernel(cu_ptr, lengths_ptr, key_mask_ptr, holes_ptr, N, T, BLOCK_M: tl.constexpr):
    # Set `holes` if a token is a key by its document, and not by the mask.
    token = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = token < T
    is_key = tl.load(key_mask_ptr + token, mask=inside, other=1) != 0
    outside = _without_result(token, cu_ptr, lengths_ptr, N, T, None, True)
    is_hole = (inside & ~outside & ~is_key).to(tl.int32)
    if tl.max(is_hole, 0) != 0:
        tl.store(holes_ptr, 1)


@triton.jit(do_not_specialize=["N", "T", "longest", "window_left"])
def _varlen_complete_kernel(
    y_ptr, lse_ptr, sinks_ptr, cu_ptr, lengths_ptr, N, T, E, longest, y_t, y_h, window_left,
    OF_KEYS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_DOCUMENTS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    head = tl.program_id(1).to(tl.int64)
    most = tl.zeros((BLOCK_DOCUMENTS,), tl.int32)
    for start in tl.range(0, N, BLOCK_DOCUMENTS):
        n = start + tl.arange(0, BLOCK_DOCUMENTS)
        begin = tl.load(cu_ptr + n, mask=n < N, other=0).to(tl.int32)
        end = tl.load(cu_ptr + n + 1, mask=n < N, other=0).to(tl.int32)
        most = tl.maximum(most, end - begin)
    # For each token, as the interpreter has no scalar masks.
    is_too_long = tl.zeros_like(token) + tl.max(most, 0) > longest
    outside = _without_result(token, cu_ptr, lengths_ptr, N, T, window_left, OF_KEYS)
    inside = token < T
    if sinks_ptr is None:
        # Only these rows are written.
        inside = inside & (outside | is_too_long)
    cols = tl.arange(0, BLOCK_E)
    at = y_ptr + head * y_h + (token.to(tl.int64)[:, None] * y_t + cols[None, :])
    mask = inside[:, None] & (cols < E)[None, :]
    y = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    if lse_ptr is not None:
        at_lse = lse_ptr + head * T + token
        lse = tl.load(at_lse, mask=inside, other=0.0)
        lse = tl.where(outside, -float("inf"), lse)
        if sinks_ptr is not None:
            sink = tl.load(sinks_ptr + head).to(tl.float32)
            higher = tl.maximum(lse, sink)
            total = tl.exp2((lse - higher) * LOG2E) + tl.exp2((sink - higher) * LOG2E)
            with_sink = higher + tl.log2(total) * LN2
            y = y * tl.exp2((lse - with_sink) * LOG2E)[:, None]
            lse = with_sink
        tl.store(at_lse, lse, mask=inside)
    # Behind the sinks, of which minus infinity would make NaN of a row without keys.
    y = tl.where(outside[:, None], 0.0, y)
    y = tl.where(is_too_long[:, None], float("nan"), y)
    tl.store(at, y.to(y_ptr.dtype.element_ty), mask=mask)


def holes_of(call: Any) -> Tensor | None:
    """Return a tensor of one int32, 1 if key_mask hides a key of a document; None without it."""
    if call.key_mask is None:
        return None
    T, holes = call.query.shape[0], torch.zeros(1, dtype=torch.int32, device=call.query.device)
    launch(
        _varlen_holes_kernel, (cdiv(T, 1024),), call.query,
        *documents_of(call), holes, call.cu_seqlens.shape[0] - 1, T, BLOCK_M=1024,
    )  # fmt: skip
    return holes


def complete(call: Any, y: Tensor, lse: Tensor | None = None, *, of_keys: bool = False) -> None:
    """Complete what an engine wrote into y or a gradient, (T, heads, E), and into lse.

    Rows without a result are 0, and with lse both get the sinks. `of_keys` says that the rows are
    those of keys. If a document is longer than max_seqlen, all numbers are NaN.
    """
    T, heads, E = y.shape
    cu_seqlens, lengths, _ = documents_of(call)
    launch(
        _varlen_complete_kernel, (cdiv(T, TOKENS), heads), y,
        y, lse, None if lse is None else call.sinks, cu_seqlens, lengths,
        call.cu_seqlens.shape[0] - 1, T, E, call.max_seqlen, *y.stride()[:2],
        None if call.window_left < 0 else call.window_left,
        OF_KEYS=of_keys, BLOCK_M=TOKENS, BLOCK_E=next_power_of_2(E), BLOCK_DOCUMENTS=128,
        num_warps=4,
    )  # fmt: skip
