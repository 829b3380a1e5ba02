"""neighborhood_attention.

A run is some consecutive positions of one row, among those of one residue class modulo the
dilation. In the forward and in the gradient of queries, a tile is a run of queries, and walks the
runs of keys that their windows cover. In the gradient of keys and values it is a run of keys, and
walks the runs of queries that attend to them. A program takes tiles in turn; the cube core computes
the products.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ...common.attention.neighborhood_attention import (
    Problem,
    keys_of,
    keys_of_tile,
    queries_of_tile,
    register,
    strides,
)
from ...common.tensors import next_power_of_2
from ..tile import remaining
from ..tiling import UB_SHARE, Plan, launch, ub_bytes, vector_cores

# The score outside the windows. As with -inf, its exponential is 0 in float32, but the difference
# of two such scores is not NaN.
FAR = tl.constexpr(-1e30)

# Bytes of the Unified Buffer per element of a run's vectors and of its scores. The planners of
# ascendnpu-ir 1.0.0, 1.1.0 and 1.2.0 take at most 83% of 196608 bytes for every run that this and
# the longest runs below allow. With 64 queries the gradient of queries takes up to 99%.
COST = 20.0
LONGEST_RUN = 64
LONGEST_RUN_OF_QUERY_GRADIENT = 32


@triton.jit
def _row_of_tile(tile, heads, Y, X, dilation_y, dilation_x, tiles_x, BLOCK: tl.constexpr):
    """Return a tile's batch, head, row, residue class of columns, the lengths of its classes in y
    and x, and the index of the run's first position in its class."""
    first = tile % tiles_x * BLOCK
    tile = tile // tiles_x
    class_x = tile % dilation_x
    tile = tile // dilation_x
    row = tile % Y
    tile = tile // Y
    n_y = (Y - 1 - row % dilation_y) // dilation_y + 1
    n_x = (X - 1 - class_x) // dilation_x + 1
    head = (tile % heads).to(tl.int64)
    batch = (tile // heads).to(tl.int64)
    return batch, head, row, class_x, n_y, n_x, first


@triton.jit
def _offsets(stride, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, WIDE: tl.constexpr):
    """Return the offsets of a run's vectors, as int64 if WIDE."""
    rows = tl.arange(0, BLOCK)[:, None]
    if WIDE:
        rows = rows.to(tl.int64)
    return rows * stride + tl.arange(0, BLOCK_D)[None, :]


@triton.jit
def _mask(count, D, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return the mask of `count` vectors of D elements."""
    return (tl.arange(0, BLOCK)[:, None] < count) & (tl.arange(0, BLOCK_D)[None, :] < D)


@triton.jit
def _seen(key, first, end):
    """Return 1.0 where first <= key < end, else 0.0.

    Comparisons of int32 would run as a scalar loop on CANN 8.5.
    """
    from_first = tl.minimum(tl.maximum(key - first + 1, 0), 1)
    to_end = tl.minimum(tl.maximum(end - key, 0), 1)
    return (from_first * to_end).to(tl.float32)


@triton.jit
def _neighborhood_forward_kernel(
    q_ptr, k_ptr, v_ptr, y_ptr, lse_ptr,
    heads, group, Y, X, D, dilation_y, dilation_x, left_y, right_y, left_x, right_x,
    q_b, q_h, q_y, q_x, k_b, k_h, k_y, k_x, v_b, v_h, v_y, v_x, y_b, y_h, y_y, y_x,
    tiles, tiles_x, scale,
    SHIFTED_Y: tl.constexpr, SHIFTED_X: tl.constexpr, WIDE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # A run is BLOCK_M queries or keys, whose vectors have D of BLOCK_N columns. In names, at is a
    # query's position in x, and q_at, k_at and so on are offsets in memory.
    run = tl.arange(0, BLOCK_M)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0)):
        batch, head, row, class_x, n_y, n_x, first = _row_of_tile(
            tile, heads, Y, X, dilation_y, dilation_x, tiles_x, BLOCK_M
        )
        class_y = row % dilation_y
        count = remaining(n_x, first, BLOCK_M)
        at = (class_x + first * dilation_x).to(tl.int64)
        key_head = head // group
        q_at = batch * q_b + head * q_h + row.to(tl.int64) * q_y + at * q_x
        q_offsets = _offsets(q_x * dilation_x, BLOCK_M, BLOCK_N, WIDE)
        mask = _mask(count, D, BLOCK_M, BLOCK_N)
        q = tl.load(q_ptr + q_at + q_offsets, mask=mask, other=0.0)
        low_y, high_y = keys_of(row // dilation_y, n_y, left_y, right_y, SHIFTED_Y)
        low_x, high_x = keys_of_tile(first, n_x, left_x, right_x, BLOCK_M, SHIFTED_X)
        start, end = keys_of(first + run, n_x, left_x, right_x, SHIFTED_X)
        turns_x = tl.cdiv(tl.maximum(high_x - low_x, 0), BLOCK_M)
        maximum = tl.full((BLOCK_M,), FAR, tl.float32)
        total = tl.zeros((BLOCK_M,), tl.float32)
        mixed = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        k_offsets = _offsets(k_x * dilation_x, BLOCK_M, BLOCK_N, WIDE)
        v_offsets = _offsets(v_x * dilation_x, BLOCK_M, BLOCK_N, WIDE)
        for turn in tl.range(0, (high_y - low_y) * turns_x):
            key_y = (class_y + (low_y + turn // turns_x) * dilation_y).to(tl.int64)
            key_first = low_x + turn % turns_x * BLOCK_M
            key_x = (class_x + key_first * dilation_x).to(tl.int64)
            key_mask = _mask(remaining(high_x, key_first, BLOCK_M), D, BLOCK_M, BLOCK_N)
            k_at = batch * k_b + key_head * k_h + key_y * k_y + key_x * k_x
            v_at = batch * v_b + key_head * v_h + key_y * v_y + key_x * v_x
            k = tl.load(k_ptr + k_at + k_offsets, mask=key_mask, other=0.0)
            v = tl.load(v_ptr + v_at + v_offsets, mask=key_mask, other=0.0)
            seen = _seen((key_first + run)[None, :], start[:, None], end[:, None])
            score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
            score = score * seen - (1.0 - seen) * -FAR
            higher = tl.maximum(maximum, tl.max(score, 1))
            p = tl.exp(score - higher[:, None]) * seen
            decay = tl.exp(maximum - higher)
            total = total * decay + tl.sum(p, 1)
            product = tl.dot(p.to(v.dtype), v, input_precision="ieee")
            mixed = mixed * decay[:, None] + product
            maximum = higher
        # A query past the run's end may see no keys: its total is 0.
        total = tl.maximum(total, 1e-30)
        y = (mixed / total[:, None]).to(y_ptr.dtype.element_ty)
        y_at = batch * y_b + head * y_h + row.to(tl.int64) * y_y + at * y_x
        y_offsets = _offsets(y_x * dilation_x, BLOCK_M, BLOCK_N, WIDE)
        tl.store(y_ptr + y_at + y_offsets, y, mask=mask)
        lse_at = ((batch * heads + head) * Y + row) * X + at
        tl.store(lse_ptr + lse_at + run * dilation_x, maximum + tl.log(total), mask=run < count)


@triton.jit
def _neighborhood_query_gradient_kernel(
    dy_ptr, dlse_ptr, q_ptr, k_ptr, v_ptr, y_ptr, lse_ptr, dq_ptr, delta_ptr,
    heads, group, Y, X, D, dilation_y, dilation_x, left_y, right_y, left_x, right_x,
    dy_b, dy_h, dy_y, dy_x, q_b, q_h, q_y, q_x, k_b, k_h, k_y, k_x, v_b, v_h, v_y, v_x,
    y_b, y_h, y_y, y_x, dq_b, dq_h, dq_y, dq_x,
    tiles, tiles_x, scale,
    SHIFTED_Y: tl.constexpr, SHIFTED_X: tl.constexpr, WIDE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # delta_i = dy_i . y_i - dlse_i is stored for the gradients of key and value.
    run = tl.arange(0, BLOCK_M)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0)):
        batch, head, row, class_x, n_y, n_x, first = _row_of_tile(
            tile, heads, Y, X, dilation_y, dilation_x, tiles_x, BLOCK_M
        )
        count = remaining(n_x, first, BLOCK_M)
        at = (class_x + first * dilation_x).to(tl.int64)
        at_y = row.to(tl.int64)
        mask = _mask(count, D, BLOCK_M, BLOCK_N)
        dy_offsets = _offsets(dy_x * dilation_x, BLOCK_M, BLOCK_N, WIDE)
        dy_at = batch * dy_b + head * dy_h + at_y * dy_y + at * dy_x
        dy = tl.load(dy_ptr + dy_at + dy_offsets, mask=mask, other=0.0)
        y_offsets = _offsets(y_x * dilation_x, BLOCK_M, BLOCK_N, WIDE)
        y_at = batch * y_b + head * y_h + at_y * y_y + at * y_x
        y = tl.load(y_ptr + y_at + y_offsets, mask=mask, other=0.0)
        lse_at = ((batch * heads + head) * Y + row) * X + at
        lse_offsets = run * dilation_x
        dlse = tl.load(dlse_ptr + lse_at + lse_offsets, mask=run < count, other=0.0)
        delta = tl.sum(dy.to(tl.float32) * y.to(tl.float32), 1) - dlse.to(tl.float32)
        tl.store(delta_ptr + lse_at + lse_offsets, delta, mask=run < count)
        if dq_ptr is not None:
            class_y = row % dilation_y
            key_head = head // group
            q_offsets = _offsets(q_x * dilation_x, BLOCK_M, BLOCK_N, WIDE)
            q_at = batch * q_b + head * q_h + at_y * q_y + at * q_x
            q = tl.load(q_ptr + q_at + q_offsets, mask=mask, other=0.0)
            lse = tl.load(lse_ptr + lse_at + lse_offsets, mask=run < count, other=0.0)
            low_y, high_y = keys_of(row // dilation_y, n_y, left_y, right_y, SHIFTED_Y)
            low_x, high_x = keys_of_tile(first, n_x, left_x, right_x, BLOCK_M, SHIFTED_X)
            start, end = keys_of(first + run, n_x, left_x, right_x, SHIFTED_X)
            turns_x = tl.cdiv(tl.maximum(high_x - low_x, 0), BLOCK_M)
            dq = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            k_offsets = _offsets(k_x * dilation_x, BLOCK_M, BLOCK_N, WIDE)
            v_offsets = _offsets(v_x * dilation_x, BLOCK_M, BLOCK_N, WIDE)
            for turn in tl.range(0, (high_y - low_y) * turns_x):
                key_y = (class_y + (low_y + turn // turns_x) * dilation_y).to(tl.int64)
                key_first = low_x + turn % turns_x * BLOCK_M
                key_x = (class_x + key_first * dilation_x).to(tl.int64)
                key_mask = _mask(remaining(high_x, key_first, BLOCK_M), D, BLOCK_M, BLOCK_N)
                k_at = batch * k_b + key_head * k_h + key_y * k_y + key_x * k_x
                v_at = batch * v_b + key_head * v_h + key_y * v_y + key_x * v_x
                k = tl.load(k_ptr + k_at + k_offsets, mask=key_mask, other=0.0)
                v = tl.load(v_ptr + v_at + v_offsets, mask=key_mask, other=0.0)
                seen = _seen((key_first + run)[None, :], start[:, None], end[:, None])
                score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
                p = tl.exp(score * seen - (1.0 - seen) * -FAR - lse[:, None])
                dp = tl.dot(dy.to(v.dtype), tl.trans(v), input_precision="ieee")
                ds = p * (dp - delta[:, None]) * seen
                dq += tl.dot(ds.to(k.dtype), k, input_precision="ieee")
            dq_offsets = _offsets(dq_x * dilation_x, BLOCK_M, BLOCK_N, WIDE)
            dq_at = batch * dq_b + head * dq_h + at_y * dq_y + at * dq_x
            value = (dq * scale).to(dq_ptr.dtype.element_ty)
            tl.store(dq_ptr + dq_at + dq_offsets, value, mask=mask)


@triton.jit
def _neighborhood_key_gradient_kernel(
    dy_ptr, q_ptr, k_ptr, v_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr,
    heads, group, Y, X, D, dilation_y, dilation_x, left_y, right_y, left_x, right_x,
    dy_b, dy_h, dy_y, dy_x, q_b, q_h, q_y, q_x, k_b, k_h, k_y, k_x, v_b, v_h, v_y, v_x,
    dk_b, dk_h, dk_y, dk_x, dv_b, dv_h, dv_y, dv_x,
    tiles, tiles_x, scale,
    SHIFTED_Y: tl.constexpr, SHIFTED_X: tl.constexpr, WIDE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    run = tl.arange(0, BLOCK_M)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0)):
        batch, key_head, row, class_x, n_y, n_x, first = _row_of_tile(
            tile, heads // group, Y, X, dilation_y, dilation_x, tiles_x, BLOCK_M
        )
        class_y = row % dilation_y
        at = (class_x + first * dilation_x).to(tl.int64)
        at_y = row.to(tl.int64)
        mask = _mask(remaining(n_x, first, BLOCK_M), D, BLOCK_M, BLOCK_N)
        k_offsets = _offsets(k_x * dilation_x, BLOCK_M, BLOCK_N, WIDE)
        k_at = batch * k_b + key_head * k_h + at_y * k_y + at * k_x
        k = tl.load(k_ptr + k_at + k_offsets, mask=mask, other=0.0)
        v_offsets = _offsets(v_x * dilation_x, BLOCK_M, BLOCK_N, WIDE)
        v_at = batch * v_b + key_head * v_h + at_y * v_y + at * v_x
        v = tl.load(v_ptr + v_at + v_offsets, mask=mask, other=0.0)
        low_y, high_y = queries_of_tile(row // dilation_y, n_y, left_y, right_y, 1, SHIFTED_Y)
        low_x, high_x = queries_of_tile(first, n_x, left_x, right_x, BLOCK_M, SHIFTED_X)
        turns_x = tl.cdiv(tl.maximum(high_x - low_x, 0), BLOCK_M)
        turns = (high_y - low_y) * turns_x
        dk = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        dv = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        q_offsets = _offsets(q_x * dilation_x, BLOCK_M, BLOCK_N, WIDE)
        dy_offsets = _offsets(dy_x * dilation_x, BLOCK_M, BLOCK_N, WIDE)
        # All heads of queries that share this head of keys, each with all runs of its queries.
        for turn in tl.range(0, turns * group):
            head = key_head * group + turn // turns
            step = turn % turns
            from_y = (class_y + (low_y + step // turns_x) * dilation_y).to(tl.int64)
            query_first = low_x + step % turns_x * BLOCK_M
            from_x = (class_x + query_first * dilation_x).to(tl.int64)
            count = remaining(high_x, query_first, BLOCK_M)
            query_mask = _mask(count, D, BLOCK_M, BLOCK_N)
            q_at = batch * q_b + head * q_h + from_y * q_y + from_x * q_x
            q = tl.load(q_ptr + q_at + q_offsets, mask=query_mask, other=0.0)
            dy_at = batch * dy_b + head * dy_h + from_y * dy_y + from_x * dy_x
            dy = tl.load(dy_ptr + dy_at + dy_offsets, mask=query_mask, other=0.0)
            dy = dy.to(v.dtype)
            lse_at = ((batch * heads + head) * Y + from_y) * X + from_x
            lse_offsets = run * dilation_x
            lse = tl.load(lse_ptr + lse_at + lse_offsets, mask=run < count, other=0.0)
            start, end = keys_of(query_first + run, n_x, left_x, right_x, SHIFTED_X)
            # A query past the run's end, which is not loaded, must see no key.
            end = tl.minimum(end, (count - run) * (n_x + 1))
            seen = _seen((first + run)[:, None], start[None, :], end[None, :])
            score = tl.dot(k, tl.trans(q), input_precision="ieee") * scale
            p = tl.exp(score * seen - (1.0 - seen) * -FAR - lse[None, :]) * seen
            if dv_ptr is not None:
                dv += tl.dot(p.to(dy.dtype), dy, input_precision="ieee")
            if dk_ptr is not None:
                delta = tl.load(delta_ptr + lse_at + lse_offsets, mask=run < count, other=0.0)
                dp = tl.dot(v, tl.trans(dy), input_precision="ieee")
                ds = p * (dp - delta[None, :])
                dk += tl.dot(ds.to(q.dtype), q, input_precision="ieee")
        if dk_ptr is not None:
            dk_offsets = _offsets(dk_x * dilation_x, BLOCK_M, BLOCK_N, WIDE)
            dk_at = batch * dk_b + key_head * dk_h + at_y * dk_y + at * dk_x
            value = (dk * scale).to(dk_ptr.dtype.element_ty)
            tl.store(dk_ptr + dk_at + dk_offsets, value, mask=mask)
        if dv_ptr is not None:
            dv_offsets = _offsets(dv_x * dilation_x, BLOCK_M, BLOCK_N, WIDE)
            dv_at = batch * dv_b + key_head * dv_h + at_y * dv_y + at * dv_x
            tl.store(dv_ptr + dv_at + dv_offsets, dv.to(dv_ptr.dtype.element_ty), mask=mask)


def plan_runs(problem: Problem, longest: int) -> Plan:
    """Choose the longest run, of at least 16 positions, whose vectors and scores fit the buffer."""
    BLOCK_N = next_power_of_2(max(16, problem.D))
    # Vectors that are apart in memory, as with a dilation, take several times the buffer: with runs
    # of 64 the gradient of keys needs 203%.
    run = 16 if problem.x.dilation > 1 else longest
    while run > 16 and run * (BLOCK_N + run) * COST > ub_bytes() * UB_SHARE:
        run //= 2
    return Plan(run, BLOCK_N, vector_cores())


KERNELS = {
    "forward": _neighborhood_forward_kernel,
    "query": _neighborhood_query_gradient_kernel,
    "key": _neighborhood_key_gradient_kernel,
}


def launch_runs(
    kind: str, problem: Problem, tensors: tuple[Tensor | None, ...],
    strided: tuple[Tensor | None, ...], plan: Plan | None,
) -> None:  # fmt: skip
    """Launch a kernel of KERNELS. The strides of `strided` are its arguments, in that order."""
    longest = LONGEST_RUN_OF_QUERY_GRADIENT if kind == "query" else LONGEST_RUN
    plan = plan or plan_runs(problem, longest)
    heads = problem.key_heads if kind == "key" else problem.heads
    tiles_x = problem.tiles(plan.BLOCK_M, problem.x, problem.X)
    tiles = problem.batch * heads * problem.Y * problem.x.dilation * tiles_x
    first, *others = tensors
    assert first is not None
    # Offsets within a tile are int32 unless positions are too far apart.
    furthest = max(strides(x)[3] for x in strided) * problem.x.dilation * plan.BLOCK_M
    launch(
        KERNELS[kind], plan, tiles, first, *others,
        *problem.arguments, *(stride for x in strided for stride in strides(x)),
        tiles, tiles_x, problem.scale,
        **problem.constants, WIDE=furthest >= 2**31,
    )  # fmt: skip


register("npu", launch_runs)
