"""group_norm of groups that fit in the L2 cache but not in registers: a program reads each twice.

The first walk through the group asks the caches to keep it. The second goes backwards, finds the
last KEPT tiles in registers, and asks to keep nothing. More than one kept tile fills the registers
of a processor, whose only program then walks one group after the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ....common.tensors import cdiv, next_power_of_2
from ....common.triton_math import folded, to_float32_again
from ...launch import Table, launch, on_nvidia, plan_for, processors
from ...sums import four_sums, mean_and_rstd, near_mean, two_totals
from .group_plan import GroupedShape, GroupPlan, per_channel


@triton.jit
def _tile(tile, C_G, S, PARTS, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr):
    # Return the channels of a tile, its offsets in the group, and its mask. Offsets are int32: a
    # group that is walked is small enough (WALKS), and int64 offsets would cost a third of the
    # speed.
    channels = tile // PARTS * BLOCK_C + tl.arange(0, BLOCK_C)[:, None]
    positions = tile % PARTS * BLOCK_S + tl.arange(0, BLOCK_S)[None, :]
    mask = (channels < C_G) & (positions < S)
    return channels, channels * S + positions, mask


@triton.jit
def _add(x, shift, sums, squares, FOLD: tl.constexpr):
    wide = x.to(tl.float32) - shift
    return sums + folded(wide, FOLD), squares + folded(wide * wide, FOLD)


@triton.jit
def _store_y(x, mean, rstd, affine, y_ptr, place, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr):
    # One multiplication and one addition an element take so few registers that two programs of 1024
    # threads fit on a processor: 64 x 512 x 64 x 64 takes 0.145 ms on an H200, and 0.160 if
    # registers allow one.
    weight_ptr, bias_ptr, group, G, C_G = affine
    channels, offsets, mask = place
    scale = rstd
    if HAS_WEIGHT:
        scale *= per_channel(weight_ptr, channels, group, G, C_G)
    level = mean * scale
    if HAS_BIAS:
        y = x * scale + (per_channel(bias_ptr, channels, group, G, C_G) - level)
    else:
        y = x * scale - level
    tl.store(y_ptr + offsets, y.to(y_ptr.dtype.element_ty), mask=mask, cache_modifier=".cs")


@triton.jit(do_not_specialize=["GROUPS", "tiles"])
def group_walk_kernel(
    x_ptr, weight_ptr, bias_ptr, y_ptr, G, C_G, S, length, eps, GROUPS, tiles,
    HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr, PARTS: tl.constexpr, TILES: tl.constexpr,
    KNOWN: tl.constexpr, KEPT: tl.constexpr, UNROLL: tl.constexpr, FOLD: tl.constexpr,
):  # fmt: skip
    # With one kept tile a program has one group; with more, as many programs as processors take the
    # groups in turn. KNOWN: the number of tiles is a constant.
    program = tl.program_id(0).to(tl.int64)
    rounds = 1 if KEPT == 1 else tl.cdiv(GROUPS - program, tl.num_programs(0))
    count = TILES if KNOWN else tiles
    for round in tl.range(0, rounds, num_stages=1):
        group = program + round * tl.num_programs(0)
        x_group = x_ptr + group * C_G * S
        y_group = y_ptr + group * C_G * S
        # Masked elements are `near`, and 0 once the shift is subtracted.
        near = near_mean(x_group, S)
        shift = near.to(tl.float32)
        sums = tl.zeros((BLOCK_C * BLOCK_S // FOLD,), tl.float32)
        squares = tl.zeros((BLOCK_C * BLOCK_S // FOLD,), tl.float32)
        for tile in tl.range(0, count - KEPT, num_stages=1, loop_unroll_factor=UNROLL):
            _channels, offsets, mask = _tile(tile, C_G, S, PARTS, BLOCK_C, BLOCK_S)
            x = tl.load(x_group + offsets, mask=mask, other=near, eviction_policy="evict_last")
            sums, squares = _add(x, shift, sums, squares, FOLD)
        kept = ()
        for i in tl.static_range(KEPT):
            _channels, offsets, mask = _tile(count - KEPT + i, C_G, S, PARTS, BLOCK_C, BLOCK_S)
            x = tl.load(x_group + offsets, mask=mask, other=near, eviction_policy="evict_first")
            sums, squares = _add(x, shift, sums, squares, FOLD)
            kept = kept + (x,)
        sum, square = two_totals(sums, squares)
        mean, rstd, _ = mean_and_rstd(sum, square, shift, length, eps)
        affine = (weight_ptr, bias_ptr, group, G, C_G)
        for i in tl.static_range(KEPT):
            place = _tile(count - 1 - i, C_G, S, PARTS, BLOCK_C, BLOCK_S)
            x = to_float32_again(kept[KEPT - 1 - i])
            _store_y(x, mean, rstd, affine, y_group, place, HAS_WEIGHT, HAS_BIAS)
        for stored in tl.range(KEPT, count, num_stages=1, loop_unroll_factor=UNROLL):
            place = _tile(count - 1 - stored, C_G, S, PARTS, BLOCK_C, BLOCK_S)
            _channels, offsets, mask = place
            x = tl.load(x_group + offsets, mask=mask, other=0.0, eviction_policy="evict_first")
            x = x.to(tl.float32)
            _store_y(x, mean, rstd, affine, y_group, place, HAS_WEIGHT, HAS_BIAS)


@triton.jit
def _lane_sums(x, dy, shift, FOLD: tl.constexpr):
    # Return the sums of x, x**2, dy and dy * x, with x less the shift, over every FOLD neighbours,
    # which one thread holds.
    shape: tl.constexpr = (x.shape[0], x.shape[1] // FOLD, FOLD)
    x = tl.reshape(x.to(tl.float32) - shift, shape)
    dy = tl.reshape(dy.to(tl.float32), shape)
    return tl.sum(x, 2), tl.sum(x * x, 2), tl.sum(dy, 2), tl.sum(dy * x, 2)


@triton.jit
def _store_dx(dy, x, factor, slope, level, dx_ptr, offsets, mask):
    dx = to_float32_again(dy) * factor + (to_float32_again(x) * slope + level)
    tl.store(dx_ptr + offsets, dx.to(dx_ptr.dtype.element_ty), mask=mask, cache_modifier=".cs")


@triton.jit(do_not_specialize=["GROUPS", "tiles"])
def group_walk_backward_kernel(
    dy_ptr, x_ptr, weight_ptr, dx_ptr, dweight_ptr, dbias_ptr,
    G, C_G, S, length, eps, GROUPS, tiles,
    HAS_WEIGHT: tl.constexpr, NEEDS_DX: tl.constexpr, NEEDS_DWEIGHT: tl.constexpr,
    NEEDS_DBIAS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr, TILES: tl.constexpr,
    KNOWN: tl.constexpr, KEPT: tl.constexpr, UNROLL: tl.constexpr, FOLD: tl.constexpr,
):  # fmt: skip
    # A tile is all channels of the group at some positions. Threads exchange the sums of channels
    # once, at the end of the first walk; the group's sums follow from those. Kept tiles are x's,
    # and dy's too if only one is kept: 64 x 512 x 64 x 64 takes 0.218 ms on an H200 with 4 of x,
    # 0.226 with one of dy beside them, and 0.259 with one of each.
    program = tl.program_id(0).to(tl.int64)
    rounds = 1 if KEPT == 1 else tl.cdiv(GROUPS - program, tl.num_programs(0))
    DY_POLICY: tl.constexpr = "evict_first" if KEPT == 1 else "evict_last"
    count = TILES if KNOWN else tiles
    for round in tl.range(0, rounds, num_stages=1):
        group = program + round * tl.num_programs(0)
        x_group = x_ptr + group * C_G * S
        dy_group = dy_ptr + group * C_G * S
        near = near_mean(x_group, S)
        shift = near.to(tl.float32)
        sums = tl.zeros((BLOCK_C, BLOCK_S // FOLD), tl.float32)
        squares = tl.zeros((BLOCK_C, BLOCK_S // FOLD), tl.float32)
        sums_dy = tl.zeros((BLOCK_C, BLOCK_S // FOLD), tl.float32)
        products = tl.zeros((BLOCK_C, BLOCK_S // FOLD), tl.float32)
        for tile in tl.range(0, count - KEPT, num_stages=1, loop_unroll_factor=UNROLL):
            _channels, offsets, mask = _tile(tile, C_G, S, count, BLOCK_C, BLOCK_S)
            x = tl.load(x_group + offsets, mask=mask, other=near, eviction_policy="evict_last")
            dy = tl.load(dy_group + offsets, mask=mask, other=0.0, eviction_policy="evict_last")
            of_x, of_squares, of_dy, of_products = _lane_sums(x, dy, shift, FOLD)
            sums += of_x
            squares += of_squares
            sums_dy += of_dy
            products += of_products
        kept = ()
        for i in tl.static_range(KEPT):
            _channels, offsets, mask = _tile(count - KEPT + i, C_G, S, count, BLOCK_C, BLOCK_S)
            x = tl.load(x_group + offsets, mask=mask, other=near, eviction_policy="evict_first")
            dy = tl.load(dy_group + offsets, mask=mask, other=0.0, eviction_policy=DY_POLICY)
            of_x, of_squares, of_dy, of_products = _lane_sums(x, dy, shift, FOLD)
            sums, squares = sums + of_x, squares + of_squares
            sums_dy, products = sums_dy + of_dy, products + of_products
            kept = kept + (x,)
        by_channel = four_sums(sums, squares, sums_dy, products)
        total, total_square = two_totals(by_channel[0], by_channel[1])
        mean, rstd, distance = mean_and_rstd(total, total_square, shift, length, eps)
        channel_dy = by_channel[2]
        channel_product = (by_channel[3] - channel_dy * distance) * rstd
        channel = tl.arange(0, BLOCK_C)
        at = group * C_G + channel
        if NEEDS_DWEIGHT:
            tl.store(dweight_ptr + at, channel_product, mask=channel < C_G)
        if NEEDS_DBIAS:
            tl.store(dbias_ptr + at, channel_dy, mask=channel < C_G)
        if NEEDS_DX:
            dx_group = dx_ptr + group * C_G * S
            factor = rstd
            if HAS_WEIGHT:
                weight = per_channel(weight_ptr, channel, group, G, C_G)
                channel_dy *= weight
                channel_product *= weight
                factor = per_channel(weight_ptr, channel[:, None], group, G, C_G) * rstd
            sum_g, projection = two_totals(channel_dy, channel_product)
            # dx = rstd * (g - mean(g) - xhat * mean(g * xhat))
            slope = -rstd * rstd * projection / length
            level = -rstd * sum_g / length - mean * slope
            for i in tl.static_range(KEPT):
                _channels, offsets, mask = _tile(count - 1 - i, C_G, S, count, BLOCK_C, BLOCK_S)
                if KEPT > 1:
                    dy = tl.load(
                        dy_group + offsets, mask=mask, other=0.0, eviction_policy="evict_first"
                    )
                _store_dx(dy, kept[KEPT - 1 - i], factor, slope, level, dx_group, offsets, mask)
            for stored in tl.range(KEPT, count, num_stages=1, loop_unroll_factor=UNROLL):
                back = count - 1 - stored
                _channels, offsets, mask = _tile(back, C_G, S, count, BLOCK_C, BLOCK_S)
                x = tl.load(x_group + offsets, mask=mask, other=0.0, eviction_policy="evict_first")
                dy = tl.load(
                    dy_group + offsets, mask=mask, other=0.0, eviction_policy="evict_first"
                )
                _store_dx(dy, x, factor, slope, level, dx_group, offsets, mask)


@dataclass(frozen=True)
class Walk(GroupPlan):
    """A program walks through a group twice, `unroll` tiles a turn of the loop, and keeps the last
    `kept` tiles in registers.

    A tile of the backward has all the group's channels.
    """

    unroll: int = 1
    kept: int = 1


class WalkTile(NamedTuple):
    """A Walk before its tile has a shape: the tile has `elements` elements."""

    elements: int
    threads: int
    unroll: int = 1
    kept: int = 1


# Tables by the largest number of elements of a group. Larger groups do not fit in the L2 cache
# together: forward, 256 of 262144 take 0.095 ms both walked and in pieces; backward, 256 of 163840
# take 0.106 walked and 0.100 in pieces.
WALKS: Table[WalkTile] = {
    # 512 groups of 20480 0.014 ms, of 40960 0.028, 2048 of 65536 0.144, 256 of 131072 0.042, 512 of
    # 163840 0.105.
    2: (
        (32768, WalkTile(4096, 512, unroll=2)),
        (61440, WalkTile(8192, 1024, unroll=2)),
        (65536, WalkTile(8192, 1024, unroll=4)),
        (98304, WalkTile(8192, 1024, unroll=2)),
        (131072, WalkTile(8192, 1024, kept=6)),
        (163840, WalkTile(16384, 1024, kept=2)),
        (262144, WalkTile(16384, 1024, unroll=4)),
    ),
    # 512 groups of 20480 0.030 ms, of 40960 0.052, 2048 of 65536 0.286, 256 of 131072 0.091.
    4: (
        (32768, WalkTile(4096, 512, unroll=2)),
        (49152, WalkTile(8192, 512, unroll=2)),
        (65536, WalkTile(8192, 1024, kept=4)),
        (163840, WalkTile(16384, 1024, kept=2)),
    ),
}
BACKWARD_WALKS: Table[WalkTile] = {
    # 512 groups of 20480 0.030 ms, 2048 of 32768 0.124, 512 of 40960 0.049, 2048 of 65536 0.222,
    # 512 of 131072 0.144.
    2: (
        (24576, WalkTile(4096, 512, unroll=2)),
        (32768, WalkTile(16384, 1024)),
        (49152, WalkTile(8192, 1024, unroll=2)),
        (65536, WalkTile(8192, 1024, kept=4)),
        (131072, WalkTile(16384, 1024, kept=2)),
    ),
    # 512 groups of 20480 0.049 ms, of 40960 0.086, 2048 of 65536 0.491, 256 of 131072 0.158.
    4: (
        (8192, WalkTile(4096, 512, unroll=2)),
        (32768, WalkTile(8192, 512)),
        (131072, WalkTile(16384, 1024)),
    ),
}
# The fewest positions of a backward's tile: 64 bytes of bfloat16.
LEAST_POSITIONS = 32


def plan_walk(x: Tensor, shape: GroupedShape, backward: bool) -> Walk | None:
    """Plan a walk, or return None if groups are too large for it, or too few.

    32 groups of 65536 take 0.009 ms, and in pieces 0.013; backward, in float32, 0.021 and 0.019.
    """
    few = 5 * shape.groups < processors(x) * (1 if not backward and shape.size <= 65536 else 2)
    tile = plan_for(x, BACKWARD_WALKS if backward else WALKS, shape.size)
    if few or tile is None:
        return None
    BLOCK_C = next_power_of_2(shape.C_G)
    if backward:
        BLOCK_S = tile.elements // BLOCK_C
        if BLOCK_S < LEAST_POSITIONS:
            return None
    else:
        BLOCK_S = min(next_power_of_2(shape.S), tile.elements)
        BLOCK_C = min(BLOCK_C, tile.elements // BLOCK_S)
    return Walk(BLOCK_C, BLOCK_S, tile.threads, tile.unroll, tile.kept)


def launch_walk(
    plan: Walk, shape: GroupedShape, x: Tensor, backward: bool, *args: Any, **options: Any
) -> None:
    parts = cdiv(shape.S, plan.BLOCK_S)
    tiles = parts * cdiv(shape.C_G, plan.BLOCK_C)
    lane = plan.BLOCK_S if backward else plan.BLOCK_C * plan.BLOCK_S
    if not backward:
        options["PARTS"] = parts
    launch(
        group_walk_backward_kernel if backward else group_walk_kernel,
        (shape.groups if plan.kept == 1 else min(shape.groups, processors(x)),), x,
        *args,
        GROUPS=shape.groups,
        # AMD's compiler unrolls a walk of a length it knows, and hoists its loads until it spills
        # 1224 bytes a thread. NVIDIA's loses up to a tenth of the speed if it does not know it.
        tiles=tiles, TILES=tiles, KNOWN=on_nvidia(x),
        KEPT=min(plan.kept, tiles), UNROLL=plan.unroll, FOLD=min(8, lane),
        **options, **plan.options,
    )  # fmt: skip
