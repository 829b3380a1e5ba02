"""The windows of neighborhood attention in kernels: positions are counted in their residue class,
of n positions (see `liger_ops/ops/attention/windows.py`)."""

import triton
import triton.language as tl

# exp(x) is computed as exp2(x * LOG2E).
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def keys_of(query, n, left, right, SHIFTED: tl.constexpr):
    """The first key of queries, and the first behind their last."""
    if SHIFTED:
        size = left + right + 1
        first = tl.minimum(tl.maximum(query - left, 0), n - size)
        end = first + size
    else:
        first = tl.maximum(query - left, 0)
        end = tl.minimum(query + right + 1, n)
    return first, end


@triton.jit
def queries_of(key, n, left, right, SHIFTED: tl.constexpr):
    """The first query that attends to keys, and the first behind the last."""
    first = tl.maximum(key - right, 0)
    end = tl.minimum(key + left + 1, n)
    if SHIFTED:
        size = left + right + 1
        first = tl.where(key < size, 0, first)
        end = tl.where(key >= n - size, n, end)
    return first, end


@triton.jit
def keys_of_tile(first, n, left, right, BLOCK: tl.constexpr, SHIFTED: tl.constexpr):
    """The keys of the queries from `first` on, at most BLOCK."""
    start, _ = keys_of(first, n, left, right, SHIFTED)
    _, end = keys_of(tl.minimum(first + BLOCK, n) - 1, n, left, right, SHIFTED)
    return start, end


@triton.jit
def queries_of_tile(first, n, left, right, BLOCK: tl.constexpr, SHIFTED: tl.constexpr):
    """The queries that attend to the keys from `first` on, at most BLOCK."""
    start, _ = queries_of(first, n, left, right, SHIFTED)
    _, end = queries_of(tl.minimum(first + BLOCK, n) - 1, n, left, right, SHIFTED)
    return start, end
