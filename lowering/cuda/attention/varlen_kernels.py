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

from ....ops.attention.varlen_attention import scale_of
from ...common.attention.neighborhood_attention import LN2
from ...common.tensors import contiguous, next_power_of_2, unit_stride
from ...common.triton_math import LOG2E, LOWEST, tanh
from ..launch import compute_capability, input_precision, launch, on_nvidia, shared_memory


@dataclass(frozen=True)
class VarlenTiles:
    """The tiles of queries and keys: a program of the key kernel keeps BLOCK_N keys, one of the
    other kernels BLOCK_M queries."""

    BLOCK_M: int
    BLOCK_N: int
    num_warps: int
    num_stages: int


# The smallest normal float32.
SMALLEST: tl.constexpr = tl.constexpr(2.0**-126)
# Bytes of shared memory that a program has on Hopper and on Blackwell's large GPUs.
LARGE_SHARED_MEMORY = 227 * 1024
# The same on an A100, of which float32 heads of more than 64 columns take 112 KiB.
MEDIUM_SHARED_MEMORY = 160 * 1024
# The most columns of a head: those that `liger_ops.varlen_attention` accepts.
MOST_COLUMNS = 256


@triton.jit
def first_token(document, cu_ptr, N, T):
    # Documents are counted from the tokens before the first, number 0; those behind the last are
    # number N + 1. A bound outside of the batch is one of the batch's.
    listed = (document >= 1) & (document <= N + 1)
    bound = tl.load(cu_ptr + (document - 1), mask=listed, other=0).to(tl.int32)
    bound = tl.where(document > N + 1, T, bound)
    return tl.minimum(tl.maximum(bound, 0), T)


@triton.jit
def tile_of_program(cu_ptr, lengths_ptr, N, T, BLOCK: tl.constexpr):
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
def load_rows(
    ptr, rows, stride, end, cols, D, MASKED: tl.constexpr, EVEN: tl.constexpr, is_row=None
):  # fmt: skip
    # EVEN says that a row has as many elements as cols; rows are below `end` unless MASKED. Rows
    # that are not read are 0: those that are not `is_row` too.
    at = ptr + (rows.to(tl.int64)[:, None] * stride + cols[None, :])
    if MASKED:
        inside = rows < end
        if is_row is not None:
            inside = inside & is_row
    if MASKED and EVEN:
        x = tl.load(at, mask=inside[:, None], other=0.0)
    elif MASKED:
        x = tl.load(at, mask=inside[:, None] & (cols < D)[None, :], other=0.0)
    elif EVEN:
        x = tl.load(at)
    else:
        x = tl.load(at, mask=(cols < D)[None, :], other=0.0)
    return x


@triton.jit
def store_rows(ptr, rows, stride, end, cols, D, values):
    at = ptr + (rows.to(tl.int64)[:, None] * stride + cols[None, :])
    mask = (rows < end)[:, None] & (cols < D)[None, :]
    tl.store(at, values.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def is_seen(query, key, is_key, length, keys, window_left, window_right, KEY_AXIS: tl.constexpr):
    # The scores are (keys, queries) for the KEY_AXIS 0, and (queries, keys) for 1.
    query, key = tl.expand_dims(query, KEY_AXIS), tl.expand_dims(key, 1 - KEY_AXIS)
    seen = (key < keys) & (query < length)
    if is_key is not None:
        seen = seen & tl.expand_dims(is_key, 1 - KEY_AXIS)
    if window_left is not None:
        seen = seen & (key >= query - window_left)
    if window_right is not None:
        seen = seen & (key <= query + window_right)
    return seen


@triton.jit
def is_key_of(key_mask_ptr, key, keys):
    # Without a mask, every token may be a key.
    is_key = None
    if key_mask_ptr is not None:
        is_key = tl.load(key_mask_ptr + key, mask=key < keys, other=0) != 0
    return is_key


@triton.jit
def scores_of(products, scale, softcap):
    # To the base 2, for exp2.
    if softcap is None:
        scores = products * (scale * LOG2E)
    else:
        scores = (softcap * LOG2E) * tanh(products * (scale * (1.0 / softcap)))
    return scores


@triton.jit
def keys_of_tile(
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
def without_full_tiles(holes_ptr, low, full_low, full_high):
    # A tile of keys with a hole needs the mask: then no tile goes without.
    has_holes = tl.load(holes_ptr) != 0
    return tl.where(has_holes, low, full_low), tl.where(has_holes, low, full_high)


@triton.jit
def _visit_keys(
    q, maximum, total, mixed, query, k_ptr, v_ptr, key_mask_ptr, k_t, v_t,
    low, high, length, keys, D, E, window_left, window_right, scale, softcap,
    MASKED: tl.constexpr, EVEN_D: tl.constexpr, EVEN_E: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    cols, value_cols = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
    for start in tl.range(low, high, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        k = load_rows(k_ptr, key, k_t, keys, cols, D, MASKED, EVEN_D)
        products = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if softcap is None:
            # The scale is above 0: the largest product has the largest score, and the scale is part
            # of the difference below, a multiplication less for each element. A factor of 0 would
            # make NaN of minus infinity.
            score, factor = products, tl.maximum(scale * LOG2E, SMALLEST)
        else:
            score, factor = scores_of(products, scale, softcap), 1.0
        is_key = None
        if MASKED:
            # A row without any key so far keeps the maximum LOWEST, for which exponentials are 0.
            is_key = is_key_of(key_mask_ptr, key, keys)
            seen = is_seen(query, key, is_key, length, keys, window_left, window_right, 1)
            score = tl.where(seen, score, -float("inf"))
        higher = tl.maximum(maximum, tl.max(score, 1) * factor)
        p = tl.exp2(score * factor - higher[:, None])
        decay = tl.exp2(maximum - higher)
        total = total * decay + tl.sum(p, 1)
        # The value of a token that is no key is not read: 0 * NaN would be NaN.
        v = load_rows(v_ptr, key, v_t, keys, value_cols, E, MASKED, EVEN_E, is_key)
        mixed = tl.dot(p.to(v.dtype), v, mixed * decay[:, None], input_precision=PRECISION)
        maximum = higher
    return maximum, total, mixed


@triton.jit(do_not_specialize=["N", "T", "window_left", "window_right"])
def _varlen_forward_kernel(
    q_ptr, k_ptr, v_ptr, cu_ptr, lengths_ptr, key_mask_ptr, holes_ptr, sinks_ptr, y_ptr, lse_ptr,
    N, T, D, E, group, q_t, q_h, k_t, k_h, v_t, v_h, y_t, y_h,
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
    query = first + tl.arange(0, BLOCK_M)
    q = load_rows(q_ptr, query, q_t, length, tl.arange(0, BLOCK_D), D, True, EVEN_D)
    maximum = tl.full((BLOCK_M,), LOWEST, tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    mixed = tl.zeros((BLOCK_M, BLOCK_E), tl.float32)
    low, full_low, full_high, high = keys_of_tile(
        first, tl.minimum(first + BLOCK_M, length), keys, window_left, window_right, BLOCK_N
    )
    if key_mask_ptr is not None:
        key_mask_ptr += begin
        full_low, full_high = without_full_tiles(holes_ptr, low, full_low, full_high)
    if window_left is not None:
        maximum, total, mixed = _visit_keys(
            q, maximum, total, mixed, query, k_ptr, v_ptr, key_mask_ptr, k_t, v_t,
            low, full_low, length, keys, D, E, window_left, window_right, scale, softcap,
            True, EVEN_D, EVEN_E, PRECISION, BLOCK_N, BLOCK_D, BLOCK_E,
        )  # fmt: skip
    maximum, total, mixed = _visit_keys(
        q, maximum, total, mixed, query, k_ptr, v_ptr, key_mask_ptr, k_t, v_t,
        full_low, full_high, length, keys, D, E, window_left, window_right, scale, softcap,
        False, EVEN_D, EVEN_E, PRECISION, BLOCK_N, BLOCK_D, BLOCK_E,
    )  # fmt: skip
    maximum, total, mixed = _visit_keys(
        q, maximum, total, mixed, query, k_ptr, v_ptr, key_mask_ptr, k_t, v_t,
        full_high, high, length, keys, D, E, window_left, window_right, scale, softcap,
        True, EVEN_D, EVEN_E, PRECISION, BLOCK_N, BLOCK_D, BLOCK_E,
    )  # fmt: skip
    sees_none = total == 0.0
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head).to(tl.float32)
        higher = tl.maximum(maximum, sink * LOG2E)
        decay = tl.exp2(maximum - higher)
        total = total * decay + tl.exp2(sink * LOG2E - higher)
        mixed = mixed * decay[:, None]
        maximum = higher
    is_empty = total == 0.0
    mixed = mixed / tl.where(is_empty, 1.0, total)[:, None]
    y_ptr += begin * y_t + head * y_h
    store_rows(y_ptr, query, y_t, length, tl.arange(0, BLOCK_E), E, mixed)
    lse = (maximum + tl.log2(tl.where(is_empty, 1.0, total))) * LN2
    lse = tl.where(is_empty, -float("inf"), lse)
    if sinks_ptr is not None:
        # Exactly: by this the backward tells such a query.
        lse = tl.where(sees_none, sink, lse)
    tl.store(lse_ptr + (head * T + begin + query), lse, mask=query < length)


def on_hopper(x: Tensor) -> bool:
    """Return whether x is on a Hopper GPU: what was timed there alone is not for others.

    Such are the tiles of heads of 64, and JOINT: the kernel of dkey and dvalue loads a query's
    statistics together, and begins with both of its first products. Heads of 64 take 1.25 ms so
    and 1.84 ms otherwise. For an A100 the compiler spills 90 loads in each turn of the loop so.
    """
    return on_nvidia(x) and compute_capability(x) == 9


def precision_of(x: Tensor, D: int) -> str:
    """Return the `input_precision` of `tl.dot` for heads of D elements.

    Where PyTorch's products of float32 are not those of TF32, each is three of TF32, as in
    PyTorch's own attention of float32. On an H200 the errors of y, dquery, dkey and dvalue against
    float64, in a causal document of 512 tokens with heads of 128, are 3.8e-7, 7.0e-7, 7.3e-7 and
    4.7e-7 so, 4.7e-7, 7.8e-7, 8.2e-7 and 5.6e-7 in PyTorch's, and 3.4e-7, 4.9e-7, 9.4e-7 and 9.1e-7
    by "ieee", which has no tensor cores: 16 and 52 ms where `tiles_of` has 4.1 and 14.
    """
    precision = input_precision(x)
    if precision == "tf32" or x.element_size() != 4 or torch.version.hip is not None:
        return precision
    fits = D <= 128 or shared_memory(x) >= MEDIUM_SHARED_MEMORY
    # Interpreted, on a CPU, every precision is that of float32.
    has_tensor_cores = not x.is_cuda or compute_capability(x) >= 8
    return "tf32x3" if fits and has_tensor_cores else precision


def tiles_of(kind: str, x: Tensor, D: int) -> VarlenTiles:
    """Plan the tiles of a kernel, "forward", "query" or "key", for heads of D elements.

    On an H200, 4 documents of 4096 tokens, causal, bfloat16, ms of the forward, of dquery, and of
    dkey and dvalue. 32 heads and 8 of keys: heads of 128 1.31, 1.39 and 2.39; with 64 x 128 in 8
    warps for the gradients 1.56 and 2.54; with 3 stages 1.60 and 3.24. Heads of 64 0.78, 0.81 and
    1.25; with 64 x 64 in the forward 0.82; with 2 stages for dkey and dvalue 1.35. 4 heads of 256
    and 1 of keys, which need the shared memory of Hopper: 0.35, 0.54 and 1.50, and with a window of
    512 0.13, 0.19 and 0.36; with the tiles of smaller GPUs 0.94, 2.33 and 2.77, and 0.27, 0.67 and
    0.73.

    4 documents of 2048 tokens, float32 as `precision_of` has it, ms of the forward and of the
    backward: 32 heads of 64 and 8 of keys 1.6 and 6.2, with 32 x 32 2.7 and 7.0; heads of 128 4.1
    and 14, with 64 x 32 4.5 and 24; 8 heads of 256 and 4 of keys 3.2 and 17, with 32 x 32 in the
    backward, for which the compiler finds no registers, 150.
    """
    memory = shared_memory(x)
    is_large = memory >= LARGE_SHARED_MEMORY
    if x.element_size() == 4:
        if D <= 64:
            tile = (64, 64) if is_large else (32, 32)
        elif D <= 128:
            tile = (32, 32) if memory >= MEDIUM_SHARED_MEMORY else (32, 16)
        else:
            tile = (32, 32) if kind == "forward" and is_large else (16, 16)
        return VarlenTiles(*tile, 4, 1)
    if D > 128:
        if not is_large:
            return VarlenTiles(64, 32, 8, 2) if kind == "forward" else VarlenTiles(32, 32, 8, 1)
        return {
            "forward": VarlenTiles(128, 64, 8, 2), "query": VarlenTiles(128, 64, 8, 1),
            "key": VarlenTiles(64, 64, 8, 2),
        }[kind]  # fmt: skip
    if kind == "forward" and D > 64:
        return VarlenTiles(128, 128, 8, 2)
    if kind == "forward":
        return VarlenTiles(128 if on_hopper(x) else 64, 64, 4, 3)
    return VarlenTiles(64, 64, 4, 3 if kind == "key" and D <= 64 and on_hopper(x) else 2)


def documents_of(call: Any) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return cu_seqlens, lengths and key_mask as kernels take them: contiguous, and bytes for a
    mask."""
    mask = contiguous(call.key_mask)
    as_bytes = None if mask is None else mask.view(torch.uint8)
    return call.cu_seqlens.contiguous(), contiguous(call.lengths), as_bytes


class Launches:
    """The arguments that the kernels of a call share."""

    def __init__(self, call: Any) -> None:
        self.call = call
        self.T, self.H, self.D = call.query.shape
        self.key_heads, self.E = call.value.shape[1:]
        self.count = call.cu_seqlens.shape[0] - 1
        self.scale = scale_of(call)
        self.query, self.key, self.value = map(unit_stride, (call.query, call.key, call.value))
        self.window = tuple(
            None if bound < 0 else bound for bound in (call.window_left, call.window_right)
        )
        self.precision = precision_of(self.query, max(self.D, self.E))

    def launch(
        self, kind: str, kernel: Any, tensors: tuple[Tensor | None, ...],
        strided: tuple[Tensor | None, ...], only_holes: bool,
    ) -> None:  # fmt: skip
        tiles = tiles_of(kind, self.query, max(self.D, self.E))
        block, heads = (tiles.BLOCK_N, self.key_heads) if kind == "key" else (tiles.BLOCK_M, self.H)
        BLOCK_D, BLOCK_E = (next_power_of_2(max(16, columns)) for columns in (self.D, self.E))
        own = {}
        if kind == "key":
            # Two statistics of each query, at least as many as threads.
            repeat = max(1, 32 * tiles.num_warps // (2 * tiles.BLOCK_M))
            own = {"REPEAT": repeat, "JOINT": on_hopper(self.query)}
        strides = (n for x in strided for n in ((0, 0) if x is None else x.stride()[:2]))
        launch(
            kernel, (self.T // block + self.count + 2, heads), self.query,
            *tensors, self.count, self.T, self.D, self.E, self.H // self.key_heads, *strides,
            *self.window, self.scale, self.call.softcap,
            ONLY_HOLES=only_holes, EVEN_D=BLOCK_D == self.D, EVEN_E=BLOCK_E == self.E,
            PRECISION=self.precision,
            BLOCK_M=tiles.BLOCK_M, BLOCK_N=tiles.BLOCK_N, BLOCK_D=BLOCK_D, BLOCK_E=BLOCK_E,
            num_warps=tiles.num_warps, num_stages=tiles.num_stages, **own,
        )  # fmt: skip


def forward(
    call: Any, y: Tensor, lse: Tensor, holes: Tensor | None, only_holes: bool = False
) -> None:
    """Compute y and lse; `holes` is that of `holes_of`. With `only_holes` nothing is written if
    there are no holes."""
    launches = Launches(call)
    strided = (launches.query, launches.key, launches.value, y)
    tensors = (*strided[:3], *documents_of(call), holes, call.sinks, y, lse)
    launches.launch("forward", _varlen_forward_kernel, tensors, strided, only_holes)
