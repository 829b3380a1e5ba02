"""group_norm of groups that fit in the L2 cache but not in registers: a program walks each twice.

The first walk asks that the group be kept in the caches; the second goes backwards, has the last
tile in registers, and asks that nothing be kept.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..sizes import cdiv
from ..triton_math import folded, widened_again
from .group_plan import Groups, per_channel
from .row_sums import four_sums, mean_and_rstd, near_mean, two_totals


@triton.jit
def _tile(tile, C_G, S, PARTS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr):
    # The channels, offsets in the group, and mask of a tile. Offsets are int32: a walked group is
    # small, and int64 ones would cost a third of the speed.
    channels = tile // PARTS * BLOCK_C + tl.arange(0, BLOCK_C)[:, None]
    positions = tile % PARTS * BLOCK_S + tl.arange(0, BLOCK_S)[None, :]
    mask = (channels < C_G) & (positions < S)
    return channels, channels * S + positions, mask


@triton.jit
def _store_y(x, mean, rstd, affine, y_ptr, place, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr):
    # One multiplication and addition an element. Two programs of 1024 threads fit a processor:
    # 64 x 512 x 64 x 64 takes 0.145 ms on an H200, 0.160 where registers leave room for one.
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


@triton.jit
def group_walk_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    G,
    C_G,
    S,
    length,
    eps,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_S: tl.constexpr,
    PARTS: tl.constexpr,
    TILES: tl.constexpr,
    UNROLL: tl.constexpr,
    FOLD: tl.constexpr,
):
    group = tl.program_id(0).to(tl.int64)
    x_ptr += group * C_G * S
    y_ptr += group * C_G * S
    near = near_mean(x_ptr, S)
    shift = near.to(tl.float32)
    sums = tl.zeros((BLOCK_C * BLOCK_S // FOLD,), tl.float32)
    squares = tl.zeros((BLOCK_C * BLOCK_S // FOLD,), tl.float32)
    for tile in tl.range(0, TILES - 1, num_stages=1, loop_unroll_factor=UNROLL):
        channels, offsets, mask = _tile(tile, C_G, S, PARTS, BLOCK_C, BLOCK_S)
        x = tl.load(x_ptr + offsets, mask=mask, other=near, eviction_policy="evict_last")
        wide = x.to(tl.float32) - shift
        sums += folded(wide, FOLD)
        squares += folded(wide * wide, FOLD)
    channels, offsets, mask = _tile(TILES - 1, C_G, S, PARTS, BLOCK_C, BLOCK_S)
    x = tl.load(x_ptr + offsets, mask=mask, other=near, eviction_policy="evict_first")
    wide = x.to(tl.float32) - shift
    sums += folded(wide, FOLD)
    squares += folded(wide * wide, FOLD)
    sum, square = two_totals(sums, squares)
    mean, rstd, _ = mean_and_rstd(sum, square, shift, length, eps)
    affine = (weight_ptr, bias_ptr, group, G, C_G)
    place = (channels, offsets, mask)
    _store_y(widened_again(x), mean, rstd, affine, y_ptr, place, HAS_WEIGHT, HAS_BIAS)
    for stored in tl.range(1, TILES, num_stages=1, loop_unroll_factor=UNROLL):
        channels, offsets, mask = _tile(TILES - 1 - stored, C_G, S, PARTS, BLOCK_C, BLOCK_S)
        x = tl.load(x_ptr + offsets, mask=mask, other=0.0, eviction_policy="evict_first")
        place = (channels, offsets, mask)
        _store_y(x.to(tl.float32), mean, rstd, affine, y_ptr, place, HAS_WEIGHT, HAS_BIAS)


@triton.jit
def _lane_sums(x, dy, shift, FOLD: tl.constexpr):
    # Of every FOLD neighbours, which a thread holds.
    shape: tl.constexpr = (x.shape[0], x.shape[1] // FOLD, FOLD)
    x = tl.reshape(x.to(tl.float32) - shift, shape)
    dy = tl.reshape(dy.to(tl.float32), shape)
    return tl.sum(x, 2), tl.sum(x * x, 2), tl.sum(dy, 2), tl.sum(dy * x, 2)


@triton.jit
def _store_dx(dy, x, factor, slope, level, dx_ptr, offsets, mask):
    dx = widened_again(dy) * factor + (widened_again(x) * slope + level)
    tl.store(dx_ptr + offsets, dx.to(dx_ptr.dtype.element_ty), mask=mask, cache_modifier=".cs")


@triton.jit
def group_walk_backward_kernel(
    dy_ptr,
    x_ptr,
    weight_ptr,
    dx_ptr,
    dweight_ptr,
    dbias_ptr,
    G,
    C_G,
    S,
    length,
    eps,
    HAS_WEIGHT: tl.constexpr,
    NEEDS_DX: tl.constexpr,
    NEEDS_DWEIGHT: tl.constexpr,
    NEEDS_DBIAS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_S: tl.constexpr,
    TILES: tl.constexpr,
    UNROLL: tl.constexpr,
    FOLD: tl.constexpr,
):
    # A tile is all channels of the group at some positions. The sums of channels, of which the
    # group's are made, are exchanged between threads once, at the end of the first walk.
    group = tl.program_id(0).to(tl.int64)
    x_ptr += group * C_G * S
    dy_ptr += group * C_G * S
    dx_ptr += group * C_G * S
    near = near_mean(x_ptr, S)
    shift = near.to(tl.float32)
    sums = tl.zeros((BLOCK_C, BLOCK_S // FOLD), tl.float32)
    squares = tl.zeros((BLOCK_C, BLOCK_S // FOLD), tl.float32)
    sums_dy = tl.zeros((BLOCK_C, BLOCK_S // FOLD), tl.float32)
    products = tl.zeros((BLOCK_C, BLOCK_S // FOLD), tl.float32)
    for tile in tl.range(0, TILES - 1, num_stages=1, loop_unroll_factor=UNROLL):
        _channels, offsets, mask = _tile(tile, C_G, S, TILES, BLOCK_C, BLOCK_S)
        x = tl.load(x_ptr + offsets, mask=mask, other=near, eviction_policy="evict_last")
        dy = tl.load(dy_ptr + offsets, mask=mask, other=0.0, eviction_policy="evict_last")
        sum, square, sum_dy, product = _lane_sums(x, dy, shift, FOLD)
        sums += sum
        squares += square
        sums_dy += sum_dy
        products += product
    _channels, offsets, mask = _tile(TILES - 1, C_G, S, TILES, BLOCK_C, BLOCK_S)
    x = tl.load(x_ptr + offsets, mask=mask, other=near, eviction_policy="evict_first")
    dy = tl.load(dy_ptr + offsets, mask=mask, other=0.0, eviction_policy="evict_first")
    last_sum, last_square, last_dy, last_product = _lane_sums(x, dy, shift, FOLD)
    sums, squares = sums + last_sum, squares + last_square
    sums_dy, products = sums_dy + last_dy, products + last_product
    by_channel = four_sums(sums, squares, sums_dy, products)
    total, total_square = two_totals(by_channel[0], by_channel[1])
    mean, rstd, step = mean_and_rstd(total, total_square, shift, length, eps)
    channel_dy = by_channel[2]
    channel_product = (by_channel[3] - channel_dy * step) * rstd
    channel = tl.arange(0, BLOCK_C)
    at = group * C_G + channel
    if NEEDS_DWEIGHT:
        tl.store(dweight_ptr + at, channel_product, mask=channel < C_G)
    if NEEDS_DBIAS:
        tl.store(dbias_ptr + at, channel_dy, mask=channel < C_G)
    if NEEDS_DX:
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
        _store_dx(dy, x, factor, slope, level, dx_ptr, offsets, mask)
        for stored in tl.range(1, TILES, num_stages=1, loop_unroll_factor=UNROLL):
            back = TILES - 1 - stored
            _channels, offsets, mask = _tile(back, C_G, S, TILES, BLOCK_C, BLOCK_S)
            x = tl.load(x_ptr + offsets, mask=mask, other=0.0, eviction_policy="evict_first")
            dy = tl.load(dy_ptr + offsets, mask=mask, other=0.0, eviction_policy="evict_first")
            _store_dx(dy, x, factor, slope, level, dx_ptr, offsets, mask)


def options(shape: Groups, backward: bool) -> dict[str, int]:
    """The constants that the kernels of a walk have, and those of a group in one tile have not."""
    plan = shape.plan
    parts = cdiv(shape.S, plan.BLOCK_S)
    if backward:
        return {"TILES": parts, "UNROLL": plan.unroll, "FOLD": min(8, plan.BLOCK_S)}
    return {
        "PARTS": parts,
        "TILES": cdiv(shape.C_G, plan.BLOCK_C) * parts,
        "UNROLL": plan.unroll,
        "FOLD": min(8, plan.BLOCK_C * plan.BLOCK_S),
    }
