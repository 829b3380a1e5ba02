"""group_norm of groups too large, or too few, for a program each: in pieces, in one launch.

One program reduces a tile to moments of its channels; a later one writes the tile's result, and
finds the tile in the L2 cache. A program waits only for programs that took a ticket before it: the
launch ends however few of them run at the same time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from ....common.tensors import cdiv, next_power_of_2
from ...launch import dependent_launch, launch, processors
from ...sums import two_sums
from .group_plan import GroupedShape, GroupPlan, per_channel


@triton.jit
def _place(tile, sizes, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr, EVEN: tl.constexpr):
    # Return a tile's group, its piece of the positions, its channels, the offset of its first
    # element (int64), offsets from there (int32), and its mask. EVEN: all tiles are full and need
    # no mask.
    _, C_G, S, _, tiles, pieces, _, _ = sizes
    group = tile // tiles
    first_channel = tile % tiles // pieces * BLOCK_C
    piece = tile % tiles % pieces
    channels = first_channel + tl.arange(0, BLOCK_C)[:, None]
    positions = tl.arange(0, BLOCK_S)[None, :]
    start = (group.to(tl.int64) * C_G + first_channel) * S + piece * BLOCK_S
    if EVEN:
        mask = tl.full((BLOCK_C, BLOCK_S), 1, tl.int1)
    else:
        mask = (channels < C_G) & (piece * BLOCK_S + positions < S)
    return group, piece, channels, start, tl.arange(0, BLOCK_C)[:, None] * S + positions, mask


@triton.jit
def _reduce(
    pointers, tile, sizes, eps,
    HAS_DY: tl.constexpr, HAS_WEIGHT: tl.constexpr, BLOCK_C: tl.constexpr,
    BLOCK_S: tl.constexpr, FOLD: tl.constexpr, ENTRIES: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    # Store the moments of each channel in the tile: x's mean and squared deviations from it, and
    # the sums of dy and of dy * (x - mean). They are combined from those of FOLD neighbours, which
    # one thread holds. `counts` is how many of the neighbours exist.
    dy_ptr, x_ptr, weight_ptr, moments_ptr, statistics_ptr, state_ptr = pointers
    G, C_G, S, groups, tiles, pieces, moment_stride, _ = sizes
    group, piece, channels, start, offsets, mask = _place(tile, sizes, BLOCK_C, BLOCK_S, EVEN)
    shape: tl.constexpr = (BLOCK_C, BLOCK_S // FOLD, FOLD)
    length_here = S - piece * BLOCK_S
    counts = length_here - tl.arange(0, BLOCK_S // FOLD)[None, :] * FOLD
    counts = tl.minimum(tl.maximum(counts, 0), FOLD).to(tl.float32)
    x = tl.load(x_ptr + start + offsets, mask=mask, other=0.0, eviction_policy="evict_last")
    if HAS_DY:
        dy = tl.load(dy_ptr + start + offsets, mask=mask, other=0.0, eviction_policy="evict_last")
    x = tl.reshape(x.to(tl.float32), shape)
    means = tl.sum(x, 2) / tl.maximum(counts, 1.0)
    centred = tl.where(tl.reshape(mask, shape), x - means[:, :, None], 0.0)
    squares = tl.sum(centred * centred, 2)
    length_here = tl.minimum(length_here, BLOCK_S).to(tl.float32)
    row = (group // G * pieces + piece).to(tl.int64)
    at = moments_ptr + row * G * C_G + group % G * C_G + channels
    if HAS_DY:
        dy = tl.reshape(dy.to(tl.float32), shape)
        sums_dy = tl.sum(dy, 2)
        products = tl.sum(dy * centred, 2)
        mean, sum_dy = two_sums(means * counts, sums_dy)
        mean /= length_here
        deviations = means - mean
        square, product = two_sums(
            squares + counts * deviations * deviations, products + sums_dy * deviations
        )
        tl.store(at + 2 * moment_stride, sum_dy, mask=channels < C_G)
        tl.store(at + 3 * moment_stride, product, mask=channels < C_G)
    else:
        mean = tl.sum(means * counts, 1)[:, None] / length_here
        deviations = means - mean
        square = tl.sum(squares + counts * deviations * deviations, 1)[:, None]
    tl.store(at, mean, mask=channels < C_G)
    tl.store(at + moment_stride, square, mask=channels < C_G)
    # One thread of the program does the atomics: the barrier puts every thread's stores before
    # them, and the order acq_rel makes the stores of all tiles visible to the group's last program.
    tl.debug_barrier()
    reduced = tl.atomic_add(state_ptr + 1 + group, 1, sem="acq_rel")
    if reduced == tiles - 1:
        _finish(pointers, group, sizes, eps, HAS_DY, HAS_WEIGHT, BLOCK_S, ENTRIES)
        tl.debug_barrier()
        tl.atomic_xchg(state_ptr + 1 + groups + group, 1, sem="release")


@triton.jit
def _finish(
    pointers, group, sizes, eps,
    HAS_DY: tl.constexpr, HAS_WEIGHT: tl.constexpr, BLOCK_S: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    # Store a group's mean, rstd, mean(g) and mean(g * xhat), from the moments of its tiles: in a
    # fixed order, whichever program comes last.
    _, _, weight_ptr, moments_ptr, statistics_ptr, _ = pointers
    G, C_G, S, groups, _, pieces, moment_stride, length = sizes
    C = G * C_G
    entries = C_G * pieces
    base = moments_ptr + (group // G * pieces).to(tl.int64) * C + group % G * C_G
    total = tl.zeros((ENTRIES,), tl.float32)
    for start in tl.range(0, entries, ENTRIES, num_stages=1):
        entry = start + tl.arange(0, ENTRIES)
        at = base + (entry // C_G).to(tl.int64) * C + entry % C_G
        count = tl.minimum(S - entry // C_G * BLOCK_S, BLOCK_S).to(tl.float32)
        total += tl.load(at, mask=entry < entries, other=0.0) * count
    mean = tl.sum(total, 0) / length
    squares = tl.zeros((ENTRIES,), tl.float32)
    sum_g = tl.zeros((ENTRIES,), tl.float32)
    product = tl.zeros((ENTRIES,), tl.float32)
    for start in tl.range(0, entries, ENTRIES, num_stages=1):
        entry = start + tl.arange(0, ENTRIES)
        mask = entry < entries
        at = base + (entry // C_G).to(tl.int64) * C + entry % C_G
        count = tl.minimum(S - entry // C_G * BLOCK_S, BLOCK_S).to(tl.float32)
        deviation = tl.load(at, mask=mask, other=0.0) - mean
        square = tl.load(at + moment_stride, mask=mask, other=0.0)
        squares += tl.where(mask, square + count * deviation * deviation, 0.0)
        if HAS_DY:
            dy = tl.load(at + 2 * moment_stride, mask=mask, other=0.0)
            dyx = tl.load(at + 3 * moment_stride, mask=mask, other=0.0) + dy * deviation
            if HAS_WEIGHT:
                weight_at = weight_ptr + group % G * C_G + entry % C_G
                weight = tl.load(weight_at, mask=mask, other=0.0).to(tl.float32)
                dy *= weight
                dyx *= weight
            sum_g += dy
            product += dyx
    rstd = tl.rsqrt(tl.sum(squares, 0) / length + eps)
    tl.store(statistics_ptr + group, mean)
    tl.store(statistics_ptr + groups + group, rstd)
    if HAS_DY:
        tl.store(statistics_ptr + 2 * groups + group, tl.sum(sum_g, 0) / length)
        tl.store(statistics_ptr + 3 * groups + group, tl.sum(product, 0) * rstd / length)


@triton.jit
def _apply(
    pointers, bias_ptr, out_ptr, tile, sizes,
    HAS_DY: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    # Write y of one tile, or with dy its dx. Loads come before the wait for the group's statistics.
    dy_ptr, x_ptr, weight_ptr, _, statistics_ptr, state_ptr = pointers
    G, C_G, _, groups, _, _, _, _ = sizes
    group, _, channels, start, offsets, mask = _place(tile, sizes, BLOCK_C, BLOCK_S, EVEN)
    x = tl.load(x_ptr + start + offsets, mask=mask, other=0.0, eviction_policy="evict_first")
    if HAS_DY:
        dy = tl.load(dy_ptr + start + offsets, mask=mask, other=0.0, eviction_policy="evict_first")
    if HAS_WEIGHT:
        weight = per_channel(weight_ptr, channels, group, G, C_G)
    while tl.atomic_add(state_ptr + 1 + groups + group, 0, sem="acquire") == 0:
        pass
    centred = x.to(tl.float32) - tl.load(statistics_ptr + group)
    rstd = tl.load(statistics_ptr + groups + group)
    scale = rstd
    if HAS_WEIGHT:
        scale = rstd * weight
    if HAS_DY:
        mean_g = tl.load(statistics_ptr + 2 * groups + group)
        projection = tl.load(statistics_ptr + 3 * groups + group)
        out = dy.to(tl.float32) * scale - rstd * mean_g - centred * (rstd * rstd * projection)
    else:
        out = centred * scale
        if HAS_BIAS:
            out += per_channel(bias_ptr, channels, group, G, C_G)
    out = out.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + start + offsets, out, mask=mask, cache_modifier=".cs")


@triton.jit(do_not_specialize=["ahead"])
def group_pieces_kernel(
    dy_ptr, x_ptr, weight_ptr, bias_ptr, out_ptr, moments_ptr, statistics_ptr, state_ptr,
    G, C_G, S, groups, tiles, pieces, ahead, moment_stride, length, eps,
    HAS_DY: tl.constexpr, NEEDS_OUT: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr,
    FOLD: tl.constexpr, ENTRIES: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    # First `ahead` tiles are reduced; then one more is reduced and one written in turn; then the
    # last `ahead` are written. state holds the next ticket, how many tiles of each group are
    # reduced, and whether its statistics are ready. A ticket, which costs 3%, takes the place of
    # program_id: a GPU promises no order of programs, and a program may only wait for earlier ones.
    # `ahead` is at least the tiles of a group: a tile is written after its group is reduced.
    ticket = tl.atomic_add(state_ptr, 1, sem="relaxed")
    total = groups * tiles
    turn = ticket - ahead
    turns = 2 * (total - ahead)
    pointers = (dy_ptr, x_ptr, weight_ptr, moments_ptr, statistics_ptr, state_ptr)
    sizes = (G, C_G, S, groups, tiles, pieces, moment_stride, length)
    if (turn < 0) | ((turn < turns) & (turn % 2 == 0)):
        _reduce(
            pointers, tl.where(turn < 0, ticket, ahead + turn // 2), sizes, eps,
            HAS_DY, HAS_WEIGHT, BLOCK_C, BLOCK_S, FOLD, ENTRIES, EVEN,
        )  # fmt: skip
    elif NEEDS_OUT:
        _apply(
            pointers, bias_ptr, out_ptr, tl.where(turn < turns, turn // 2, ticket - total), sizes,
            HAS_DY, HAS_WEIGHT, HAS_BIAS, BLOCK_C, BLOCK_S, EVEN,
        )  # fmt: skip


@triton.jit(do_not_specialize=["P"])
def group_sums_kernel(
    moments_ptr, statistics_ptr, dweight_ptr, dbias_ptr, P, G, C_G, groups, pieces, moment_stride,
    NEEDS_DWEIGHT: tl.constexpr, NEEDS_DBIAS: tl.constexpr, DEPENDENT: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    # Compute the gradients of weight and bias: a channel has P = samples x pieces moments.
    if DEPENDENT:
        gdc_wait()
    C = G * C_G
    channels = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    dweight = tl.zeros((BLOCK_P, BLOCK_C), tl.float32)
    dbias = tl.zeros((BLOCK_P, BLOCK_C), tl.float32)
    for start in range(0, P, BLOCK_P):
        parts = start + tl.arange(0, BLOCK_P)[:, None]
        mask = (parts < P) & (channels < C)
        at = moments_ptr + parts.to(tl.int64) * C + channels
        sum_dy = tl.load(at + 2 * moment_stride, mask=mask, other=0.0)
        dbias += sum_dy
        if NEEDS_DWEIGHT:
            group = parts // pieces * G + channels // C_G
            mean = tl.load(statistics_ptr + group, mask=mask, other=0.0)
            rstd = tl.load(statistics_ptr + groups + group, mask=mask, other=0.0)
            product = tl.load(at + 3 * moment_stride, mask=mask, other=0.0)
            deviation = tl.load(at, mask=mask, other=0.0) - mean
            dweight += (product + deviation * sum_dy) * rstd
    if NEEDS_DWEIGHT:
        sums = tl.sum(dweight, 0)[None, :].to(dweight_ptr.dtype.element_ty)
        tl.store(dweight_ptr + channels, sums, mask=channels < C)
    if NEEDS_DBIAS:
        sums = tl.sum(dbias, 0)[None, :].to(dbias_ptr.dtype.element_ty)
        tl.store(dbias_ptr + channels, sums, mask=channels < C)


@dataclass(frozen=True)
class Pieces(GroupPlan):
    """A program has a tile; at least `ahead` tiles are reduced before the first is written."""

    ahead: int = 1


@dataclass(frozen=True)
class Moments:
    """The sums of a backward: moments of the tiles, (4, samples x pieces, C), and statistics of the
    groups, (4, groups). A forward has 2 in place of 4."""

    moments: Tensor
    statistics: Tensor
    pieces: int


def plan_pieces(x: Tensor, shape: GroupedShape, backward: bool) -> Pieces:
    # As many tiles ahead as programs run at once. In ms, for 4x320x128x128 and 64x512x64x64:
    # backward 0.059 and 0.283, half as far 0.061 and 0.319, twice as far 0.061 and 0.328, tiles of
    # 8192 0.059 and 0.339. Forward 0.036 for 4x320x128x128, with tiles of 4096 0.042.
    elements, threads = (4096, 128) if backward else (8192, 256)
    BLOCK_S = min(next_power_of_2(shape.S), elements)
    BLOCK_C = min(next_power_of_2(shape.C_G), elements // BLOCK_S)
    return Pieces(BLOCK_C, BLOCK_S, threads, 8 * processors(x))


def launch_pieces(
    plan: Pieces, shape: GroupedShape, dy: Tensor | None, x: Tensor,
    weight: Tensor | None, bias: Tensor | None, out: Tensor | None, eps: float,
) -> Moments:  # fmt: skip
    """Write y or, if dy is given, dx to `out`. Without `out`, only reduce the tiles."""
    pieces = cdiv(shape.S, plan.BLOCK_S)
    tiles = cdiv(shape.C_G, plan.BLOCK_C) * pieces
    total = shape.groups * tiles
    C = shape.G * shape.C_G
    rows = 2 if dy is None else 4
    moments = x.new_empty((rows, x.shape[0] * pieces, C), dtype=torch.float32)
    statistics = x.new_empty((rows, shape.groups), dtype=torch.float32)
    launch(
        group_pieces_kernel, (total if out is None else 2 * total,), x,
        dy, x, weight, bias, out, moments, statistics,
        # The state: a replay of the call makes new zeros.
        x.new_zeros(1 + 2 * shape.groups, dtype=torch.int32),
        shape.G, shape.C_G, shape.S, shape.groups, tiles, pieces,
        total if out is None else min(total, max(tiles, plan.ahead)),
        moments.stride(0), float(shape.size), eps,
        HAS_DY=dy is not None, NEEDS_OUT=out is not None, HAS_WEIGHT=weight is not None,
        HAS_BIAS=bias is not None, FOLD=min(8, plan.BLOCK_S),
        ENTRIES=min(1024, next_power_of_2(shape.C_G * pieces)),
        EVEN=shape.C_G % plan.BLOCK_C == 0 and shape.S % plan.BLOCK_S == 0, **plan.options,
    )  # fmt: skip
    return Moments(moments, statistics, pieces)


def launch_channel_gradients(
    reduced: Moments, dweight: Tensor | None, dbias: Tensor | None, shape: GroupedShape
) -> None:
    """Sum the moments of a backward's tiles into the gradients of weight and bias."""
    if dweight is None and dbias is None:
        return
    P, C = reduced.moments.shape[1:]
    BLOCK_P = min(128, next_power_of_2(P))
    BLOCK_C = 8 if BLOCK_P == 128 else 16
    launch(
        group_sums_kernel, (cdiv(C, BLOCK_C),), reduced.moments,
        reduced.moments, reduced.statistics, dweight, dbias,
        P, shape.G, shape.C_G, shape.groups, reduced.pieces, reduced.moments.stride(0),
        NEEDS_DWEIGHT=dweight is not None, NEEDS_DBIAS=dbias is not None, BLOCK_P=BLOCK_P,
        BLOCK_C=BLOCK_C, num_warps=4, **dependent_launch(reduced.moments),
    )  # fmt: skip
