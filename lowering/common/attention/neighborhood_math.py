"""The windows of neighborhood attention in kernels: bounds of keys and of queries.

A position is counted within its residue class, which has n positions (see
`liger_ops/ops/attention/windows.py`). Bounds are the first position and the end, one behind the
last.
"""

import triton
import triton.language as tl

# exp(x) is computed as exp2(x * LOG2E).
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def keys_of(query, n, left, right, SHIFTED: tl.constexpr):
    """Return the bounds of the keys that queries attend to. A SHIFTED window keeps its size at the
    borders."""
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
    """Return the bounds of the queries that attend to keys."""
    first = tl.maximum(key - right, 0)
    end = tl.minimum(key + left + 1, n)
    if SHIFTED:
        size = left + right + 1
        # The shifted windows of the first queries end at `size`, those of the last start at
        # n - size.
        first = tl.where(key < size, 0, first)
        end = tl.where(key >= n - size, n, end)
    return first, end


@triton.jit
def keys_of_tile(first, n, left, right, BLOCK: tl.constexpr, SHIFTED: tl.constexpr):
    """Return the bounds of the keys of a tile of at most BLOCK queries from `first` on."""
    # Neither bound falls from a query to the next: the first and the last query have them.
    start, _ = keys_of(first, n, left, right, SHIFTED)
    _, end = keys_of(tl.minimum(first + BLOCK, n) - 1, n, left, right, SHIFTED)
    return start, end


@triton.jit
def queries_of_tile(first, n, left, right, BLOCK: tl.constexpr, SHIFTED: tl.constexpr):
    """Return the bounds of the queries that attend to a tile of at most BLOCK keys from `first`
    on."""
    start, _ = queries_of(first, n, left, right, SHIFTED)
    _, end = queries_of(tl.minimum(first + BLOCK, n) - 1, n, left, right, SHIFTED)
    return start, end
