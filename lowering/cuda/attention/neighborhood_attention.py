"""neighborhood_attention: a program has a tile of queries and walks the tiles of keys that their
windows cover, or has a tile of keys and walks the queries that attend to them.

A tile is a rectangle of positions of one residue class, BLOCK_Y high and BLOCK_X wide. Positions
are counted within the class: position p of class c is the element c + p * dilation.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from ...common.attention.neighborhood_attention import (
    LN2,
    Problem,
    keys_of,
    keys_of_tile,
    queries_of_tile,
    register,
    strides,
)
from ...common.tensors import next_power_of_2
from ...common.triton_math import LOG2E, LOWEST
from ..launch import input_precision, launch

SIZES = [
    "heads", "group", "Y", "X", "dilation_y", "dilation_x",
    "left_y", "right_y", "left_x", "right_x", "tiles_y", "tiles_x",
]  # fmt: skip


@dataclass(frozen=True)
class NeighborhoodTiles:
    """The tiles of queries and of keys have the same height and width."""

    BLOCK_Y: int
    BLOCK_X: int
    num_warps: int = 4
    num_stages: int = 2


@triton.jit
def _tile_of_program(
    heads, Y, X, dilation_y, dilation_x, tiles_y, tiles_x,
    BLOCK_Y: tl.constexpr, BLOCK_X: tl.constexpr,
):  # fmt: skip
    # Neighbouring programs have neighbouring tiles, which share keys in the L2 cache.
    program = tl.program_id(0)
    first_x = program % tiles_x * BLOCK_X
    program //= tiles_x
    first_y = program % tiles_y * BLOCK_Y
    program //= tiles_y
    class_x = program % dilation_x
    program //= dilation_x
    class_y = program % dilation_y
    program //= dilation_y
    n_y = (Y - 1 - class_y) // dilation_y + 1
    n_x = (X - 1 - class_x) // dilation_x + 1
    head = program % heads
    batch = program // heads
    return batch.to(tl.int64), head.to(tl.int64), class_y, class_x, n_y, n_x, first_y, first_x


@triton.jit
def _positions(first_y, first_x, BLOCK_Y: tl.constexpr, BLOCK_X: tl.constexpr):
    index = tl.arange(0, BLOCK_Y * BLOCK_X)
    return first_y + index // BLOCK_X, first_x + index % BLOCK_X


@triton.jit
def _load_rows(ptr, offsets, inside, cols, D):
    mask = inside[:, None] & (cols < D)[None, :]
    return tl.load(ptr + (offsets[:, None] + cols[None, :]), mask=mask, other=0.0)


@triton.jit
def _store_rows(ptr, offsets, inside, cols, D, values):
    mask = inside[:, None] & (cols < D)[None, :]
    values = values.to(ptr.dtype.element_ty)
    tl.store(ptr + (offsets[:, None] + cols[None, :]), values, mask=mask)


@triton.jit
def _inside_windows(
    key_y, key_x, first_y, end_y, first_x, end_x, PLANE: tl.constexpr
):  # fmt: skip
    # Return which keys are in which queries' windows. The arguments are rows and columns that
    # broadcast to the scores' tile. Without a PLANE, all are of one Y.
    inside = (key_x >= first_x) & (key_x < end_x)
    if PLANE:
        inside = inside & (key_y >= first_y) & (key_y < end_y)
    return inside


@triton.jit(do_not_specialize=SIZES)
def _neighborhood_forward_kernel(
    q_ptr, k_ptr, v_ptr, y_ptr, lse_ptr,
    heads, group, Y, X, D, dilation_y, dilation_x, left_y, right_y, left_x, right_x,
    q_b, q_h, q_y, q_x, k_b, k_h, k_y, k_x, v_b, v_h, v_y, v_x, y_b, y_h, y_y, y_x,
    tiles_y, tiles_x, scale,
    SHIFTED_Y: tl.constexpr, SHIFTED_X: tl.constexpr, PLANE: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_Y: tl.constexpr, BLOCK_X: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    BLOCK: tl.constexpr = BLOCK_Y * BLOCK_X
    batch, head, class_y, class_x, n_y, n_x, first_y, first_x = _tile_of_program(
        heads, Y, X, dilation_y, dilation_x, tiles_y, tiles_x, BLOCK_Y, BLOCK_X
    )
    # The grid has as many tiles for each class as the largest class needs: of a smaller class, the
    # last may have no position.
    if (first_y >= n_y) | (first_x >= n_x):
        return
    key_head = head // group
    k_ptr += batch * k_b + key_head * k_h + class_y.to(tl.int64) * k_y + class_x.to(tl.int64) * k_x
    v_ptr += batch * v_b + key_head * v_h + class_y.to(tl.int64) * v_y + class_x.to(tl.int64) * v_x
    cols = tl.arange(0, BLOCK_D)
    row_y, row_x = _positions(first_y, first_x, BLOCK_Y, BLOCK_X)
    inside = (row_y < n_y) & (row_x < n_x)
    at_y = (class_y + row_y * dilation_y).to(tl.int64)
    at_x = (class_x + row_x * dilation_x).to(tl.int64)
    q_ptr += batch * q_b + head * q_h
    q = _load_rows(q_ptr, at_y * q_y + at_x * q_x, inside, cols, D)
    start_y, stop_y = keys_of(row_y, n_y, left_y, right_y, SHIFTED_Y)
    start_x, stop_x = keys_of(row_x, n_x, left_x, right_x, SHIFTED_X)

    low_y, high_y = keys_of_tile(first_y, n_y, left_y, right_y, BLOCK_Y, SHIFTED_Y)
    low_x, high_x = keys_of_tile(first_x, n_x, left_x, right_x, BLOCK_X, SHIFTED_X)
    turns_x = tl.cdiv(high_x - low_x, BLOCK_X)
    turns = tl.cdiv(high_y - low_y, BLOCK_Y) * turns_x
    scale *= LOG2E
    maximum = tl.full((BLOCK,), LOWEST, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    mixed = tl.zeros((BLOCK, BLOCK_D), tl.float32)
    for turn in tl.range(0, turns):
        key_y, key_x = _positions(
            low_y + turn // turns_x * BLOCK_Y, low_x + turn % turns_x * BLOCK_X, BLOCK_Y, BLOCK_X
        )
        exists = (key_y < high_y) & (key_x < high_x)
        step_y = (key_y * dilation_y).to(tl.int64)
        step_x = (key_x * dilation_x).to(tl.int64)
        k = _load_rows(k_ptr, step_y * k_y + step_x * k_x, exists, cols, D)
        v = _load_rows(v_ptr, step_y * v_y + step_x * v_x, exists, cols, D)
        score = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        seen = _inside_windows(
            key_y[None, :], key_x[None, :],
            start_y[:, None], stop_y[:, None], start_x[:, None], stop_x[:, None], PLANE,
        )  # fmt: skip
        # A row without any key so far keeps the maximum LOWEST, for which the exponentials are 0.
        score = tl.where(seen, score, -float("inf"))
        higher = tl.maximum(maximum, tl.max(score, 1))
        p = tl.exp2(score - higher[:, None])
        decay = tl.exp2(maximum - higher)
        total = total * decay + tl.sum(p, 1)
        mixed = mixed * decay[:, None]
        mixed = tl.dot(p.to(v.dtype), v, mixed, input_precision=PRECISION)
        maximum = higher

    # A position behind the last has no keys: its total is 0.
    total = tl.where(inside, total, 1.0)
    y_ptr += batch * y_b + head * y_h
    _store_rows(y_ptr, at_y * y_y + at_x * y_x, inside, cols, D, mixed / total[:, None])
    at = ((batch * heads + head) * Y + at_y) * X + at_x
    tl.store(lse_ptr + at, (maximum + tl.log2(total)) * LN2, mask=inside)


@triton.jit(do_not_specialize=SIZES)
def _neighborhood_query_gradient_kernel(
    dy_ptr, dlse_ptr, q_ptr, k_ptr, v_ptr, y_ptr, lse_ptr, dq_ptr, delta_ptr,
    heads, group, Y, X, D, dilation_y, dilation_x, left_y, right_y, left_x, right_x,
    dy_b, dy_h, dy_y, dy_x, q_b, q_h, q_y, q_x, k_b, k_h, k_y, k_x, v_b, v_h, v_y, v_x,
    y_b, y_h, y_y, y_x, dq_b, dq_h, dq_y, dq_x,
    tiles_y, tiles_x, scale,
    SHIFTED_Y: tl.constexpr, SHIFTED_X: tl.constexpr, PLANE: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_Y: tl.constexpr, BLOCK_X: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    # delta_i = dy_i . y_i - dlse_i is stored for the gradients of key and value.
    BLOCK: tl.constexpr = BLOCK_Y * BLOCK_X
    batch, head, class_y, class_x, n_y, n_x, first_y, first_x = _tile_of_program(
        heads, Y, X, dilation_y, dilation_x, tiles_y, tiles_x, BLOCK_Y, BLOCK_X
    )
    if (first_y >= n_y) | (first_x >= n_x):
        return
    cols = tl.arange(0, BLOCK_D)
    row_y, row_x = _positions(first_y, first_x, BLOCK_Y, BLOCK_X)
    inside = (row_y < n_y) & (row_x < n_x)
    at_y = (class_y + row_y * dilation_y).to(tl.int64)
    at_x = (class_x + row_x * dilation_x).to(tl.int64)
    dy_ptr += batch * dy_b + head * dy_h
    dy = _load_rows(dy_ptr, at_y * dy_y + at_x * dy_x, inside, cols, D)
    y_ptr += batch * y_b + head * y_h
    y = _load_rows(y_ptr, at_y * y_y + at_x * y_x, inside, cols, D)
    at = ((batch * heads + head) * Y + at_y) * X + at_x
    dlse = tl.load(dlse_ptr + at, mask=inside, other=0.0).to(tl.float32)
    delta = tl.sum(dy.to(tl.float32) * y.to(tl.float32), 1) - dlse
    tl.store(delta_ptr + at, delta, mask=inside)
    if dq_ptr is not None:
        key_head = head // group
        k_ptr += batch * k_b + key_head * k_h
        k_ptr += class_y.to(tl.int64) * k_y + class_x.to(tl.int64) * k_x
        v_ptr += batch * v_b + key_head * v_h
        v_ptr += class_y.to(tl.int64) * v_y + class_x.to(tl.int64) * v_x
        q_ptr += batch * q_b + head * q_h
        q = _load_rows(q_ptr, at_y * q_y + at_x * q_x, inside, cols, D)
        dy = dy.to(v_ptr.dtype.element_ty)
        lse = tl.load(lse_ptr + at, mask=inside, other=0.0) * LOG2E
        start_y, stop_y = keys_of(row_y, n_y, left_y, right_y, SHIFTED_Y)
        start_x, stop_x = keys_of(row_x, n_x, left_x, right_x, SHIFTED_X)
        low_y, high_y = keys_of_tile(first_y, n_y, left_y, right_y, BLOCK_Y, SHIFTED_Y)
        low_x, high_x = keys_of_tile(first_x, n_x, left_x, right_x, BLOCK_X, SHIFTED_X)
        turns_x = tl.cdiv(high_x - low_x, BLOCK_X)
        turns = tl.cdiv(high_y - low_y, BLOCK_Y) * turns_x
        dq = tl.zeros((BLOCK, BLOCK_D), tl.float32)
        for turn in tl.range(0, turns):
            key_y, key_x = _positions(
                low_y + turn // turns_x * BLOCK_Y, low_x + turn % turns_x * BLOCK_X,
                BLOCK_Y, BLOCK_X,
            )  # fmt: skip
            exists = (key_y < high_y) & (key_x < high_x)
            step_y = (key_y * dilation_y).to(tl.int64)
            step_x = (key_x * dilation_x).to(tl.int64)
            k = _load_rows(k_ptr, step_y * k_y + step_x * k_x, exists, cols, D)
            v = _load_rows(v_ptr, step_y * v_y + step_x * v_x, exists, cols, D)
            score = tl.dot(q, tl.trans(k), input_precision=PRECISION) * (scale * LOG2E)
            seen = _inside_windows(
                key_y[None, :], key_x[None, :],
                start_y[:, None], stop_y[:, None], start_x[:, None], stop_x[:, None], PLANE,
            )  # fmt: skip
            p = tl.exp2(tl.where(seen, score - lse[:, None], -float("inf")))
            dp = tl.dot(dy, tl.trans(v), input_precision=PRECISION)
            # Not p * (dp - delta) alone: outside of the windows 0 * inf would be NaN.
            ds = tl.where(seen, p * (dp - delta[:, None]), 0.0)
            dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
        dq_ptr += batch * dq_b + head * dq_h
        _store_rows(dq_ptr, at_y * dq_y + at_x * dq_x, inside, cols, D, dq * scale)


@triton.jit(do_not_specialize=SIZES)
def _neighborhood_key_gradient_kernel(
    dy_ptr, q_ptr, k_ptr, v_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr,
    heads, group, Y, X, D, dilation_y, dilation_x, left_y, right_y, left_x, right_x,
    dy_b, dy_h, dy_y, dy_x, q_b, q_h, q_y, q_x, k_b, k_h, k_y, k_x, v_b, v_h, v_y, v_x,
    dk_b, dk_h, dk_y, dk_x, dv_b, dv_h, dv_y, dv_x,
    tiles_y, tiles_x, scale,
    SHIFTED_Y: tl.constexpr, SHIFTED_X: tl.constexpr, PLANE: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_Y: tl.constexpr, BLOCK_X: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    BLOCK: tl.constexpr = BLOCK_Y * BLOCK_X
    batch, key_head, class_y, class_x, n_y, n_x, first_y, first_x = _tile_of_program(
        heads // group, Y, X, dilation_y, dilation_x, tiles_y, tiles_x, BLOCK_Y, BLOCK_X
    )
    if (first_y >= n_y) | (first_x >= n_x):
        return
    cols = tl.arange(0, BLOCK_D)
    key_y, key_x = _positions(first_y, first_x, BLOCK_Y, BLOCK_X)
    exists = (key_y < n_y) & (key_x < n_x)
    at_y = (class_y + key_y * dilation_y).to(tl.int64)
    at_x = (class_x + key_x * dilation_x).to(tl.int64)
    k_ptr += batch * k_b + key_head * k_h
    k = _load_rows(k_ptr, at_y * k_y + at_x * k_x, exists, cols, D)
    v_ptr += batch * v_b + key_head * v_h
    v = _load_rows(v_ptr, at_y * v_y + at_x * v_x, exists, cols, D)

    low_y, high_y = queries_of_tile(first_y, n_y, left_y, right_y, BLOCK_Y, SHIFTED_Y)
    low_x, high_x = queries_of_tile(first_x, n_x, left_x, right_x, BLOCK_X, SHIFTED_X)
    turns_x = tl.cdiv(high_x - low_x, BLOCK_X)
    turns = tl.cdiv(high_y - low_y, BLOCK_Y) * turns_x
    dk = tl.zeros((BLOCK, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK, BLOCK_D), tl.float32)
    # All heads of queries that share the head of keys, each with all tiles of its queries.
    for turn in tl.range(0, turns * group):
        head = key_head * group + turn // turns
        tile = turn % turns
        row_y, row_x = _positions(
            low_y + tile // turns_x * BLOCK_Y, low_x + tile % turns_x * BLOCK_X, BLOCK_Y, BLOCK_X
        )
        inside = (row_y < high_y) & (row_x < high_x)
        from_y = (class_y + row_y * dilation_y).to(tl.int64)
        from_x = (class_x + row_x * dilation_x).to(tl.int64)
        q = _load_rows(
            q_ptr + batch * q_b + head * q_h, from_y * q_y + from_x * q_x, inside, cols, D
        )
        dy = _load_rows(
            dy_ptr + batch * dy_b + head * dy_h, from_y * dy_y + from_x * dy_x, inside, cols, D
        ).to(v.dtype)
        at = ((batch * heads + head) * Y + from_y) * X + from_x
        lse = tl.load(lse_ptr + at, mask=inside, other=0.0) * LOG2E
        start_y, stop_y = keys_of(row_y, n_y, left_y, right_y, SHIFTED_Y)
        start_x, stop_x = keys_of(row_x, n_x, left_x, right_x, SHIFTED_X)
        score = tl.dot(k, tl.trans(q), input_precision=PRECISION) * (scale * LOG2E)
        seen = inside[None, :] & _inside_windows(
            key_y[:, None], key_x[:, None],
            start_y[None, :], stop_y[None, :], start_x[None, :], stop_x[None, :], PLANE,
        )  # fmt: skip
        p = tl.exp2(tl.where(seen, score - lse[None, :], -float("inf")))
        if dv_ptr is not None:
            dv = tl.dot(p.to(dy.dtype), dy, dv, input_precision=PRECISION)
        if dk_ptr is not None:
            delta = tl.load(delta_ptr + at, mask=inside, other=0.0)
            dp = tl.dot(v, tl.trans(dy), input_precision=PRECISION)
            ds = tl.where(seen, p * (dp - delta[None, :]), 0.0)
            dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    if dk_ptr is not None:
        dk_ptr += batch * dk_b + key_head * dk_h
        _store_rows(dk_ptr, at_y * dk_y + at_x * dk_x, exists, cols, D, dk * scale)
    if dv_ptr is not None:
        dv_ptr += batch * dv_b + key_head * dv_h
        _store_rows(dv_ptr, at_y * dv_y + at_x * dv_x, exists, cols, D, dv)


def plan_tiles(
    problem: Problem, itemsize: int, elements: int = 8192, num_warps: int = 4
) -> NeighborhoodTiles:
    """Plan tiles of 64 positions, or of fewer, whose rows have `elements` elements together, but of
    at least the 16 that a matrix product takes. Exact products of float32 take more registers, and
    fit with 2048 elements. No GPU has timed this rule yet."""
    row = next_power_of_2(max(16, problem.D))
    if itemsize == 4:
        elements = 2048
    block = min(64, max(16, elements // row))
    width = block
    if problem.Y > 1:
        width = 1 << (block.bit_length() // 2)
    return NeighborhoodTiles(
        block // width, width, num_warps, num_stages=2 if row * itemsize <= 256 else 1
    )


KERNELS = {
    "forward": _neighborhood_forward_kernel,
    "query": _neighborhood_query_gradient_kernel,
    "key": _neighborhood_key_gradient_kernel,
}


def launch_tiles(
    kind: str, problem: Problem, tensors: tuple[Tensor | None, ...],
    strided: tuple[Tensor | None, ...], tiles: NeighborhoodTiles | None,
) -> None:  # fmt: skip
    first, second, *_ = strided
    assert first is not None and second is not None
    if tiles is None:
        # With 4 warps heads of 64 spill registers on an H200, and with twice the elements heads of
        # 128 on an MI300.
        of_keys = {"elements": 4096, "num_warps": 8} if kind == "key" else {}
        tiles = plan_tiles(problem, second.element_size(), **of_keys)
    tiles_y = problem.tiles(tiles.BLOCK_Y, problem.y, problem.Y)
    tiles_x = problem.tiles(tiles.BLOCK_X, problem.x, problem.X)
    heads = problem.key_heads if kind == "key" else problem.heads
    launch(
        KERNELS[kind], (problem.batch * heads * problem.classes * tiles_y * tiles_x,), first,
        *tensors, *problem.arguments, *(stride for x in strided for stride in strides(x)),
        tiles_y, tiles_x, problem.scale,
        **problem.constants, PLANE=max(problem.Y, tiles.BLOCK_Y) > 1,
        PRECISION=input_precision(first),
        BLOCK_Y=tiles.BLOCK_Y, BLOCK_X=tiles.BLOCK_X,
        BLOCK_D=next_power_of_2(max(16, problem.D)),
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip


register("cuda", launch_tiles)
