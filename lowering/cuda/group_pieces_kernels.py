"""The Triton kernels of group_norm of groups in pieces: see group_pieces."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from .group_plan import per_channel
from .row_sums import two_sums


@triton.jit
def _place(
    tile, tiles, pieces, C_G, S, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr, EVEN: tl.constexpr
):
    # A tile's group, piece of the positions, channels, address of its first element, offsets from
    # there, and mask. EVEN: tiles are full, and need none.
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
    dy_ptr,
    x_ptr,
    weight_ptr,
    moments_ptr,
    statistics_ptr,
    state_ptr,
    tile,
    tiles,
    G,
    C_G,
    S,
    groups,
    pieces,
    moment_stride,
    length,
    eps,
    HAS_DY: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_S: tl.constexpr,
    FOLD: tl.constexpr,
    ENTRIES: tl.constexpr,
    EVEN: tl.constexpr,
):
    # Of each channel in the tile: mean, squared deviations, and of dy the sum and the sum of
    # dy * (x - mean); first of FOLD neighbours, which a thread holds.
    group, piece, channels, start, offsets, mask = _place(
        tile, tiles, pieces, C_G, S, BLOCK_C, BLOCK_S, EVEN
    )
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
    tl.debug_barrier()
    reduced = tl.atomic_add(state_ptr + 1 + group, 1, sem="acq_rel")
    if reduced == tiles - 1:
        _finish(
            weight_ptr,
            moments_ptr,
            statistics_ptr,
            group,
            G,
            C_G,
            S,
            groups,
            pieces,
            moment_stride,
            length,
            eps,
            HAS_DY,
            HAS_WEIGHT,
            BLOCK_S,
            ENTRIES,
        )
        tl.debug_barrier()
        tl.atomic_xchg(state_ptr + 1 + groups + group, 1, sem="release")


@triton.jit
def _finish(
    weight_ptr,
    moments_ptr,
    statistics_ptr,
    group,
    G,
    C_G,
    S,
    groups,
    pieces,
    moment_stride,
    length,
    eps,
    HAS_DY: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    BLOCK_S: tl.constexpr,
    ENTRIES: tl.constexpr,
):
    # A group's mean, rstd, mean(g) and mean(g * xhat) from the moments of its tiles.
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
    dy_ptr,
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    statistics_ptr,
    state_ptr,
    tile,
    tiles,
    G,
    C_G,
    S,
    groups,
    pieces,
    HAS_DY: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_S: tl.constexpr,
    EVEN: tl.constexpr,
):
    # y, or with dy dx, of one tile. What needs no statistics is loaded before the wait for them.
    group, piece, channels, start, offsets, mask = _place(
        tile, tiles, pieces, C_G, S, BLOCK_C, BLOCK_S, EVEN
    )
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
    dy_ptr,
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    moments_ptr,
    statistics_ptr,
    state_ptr,
    G,
    C_G,
    S,
    groups,
    tiles,
    pieces,
    ahead,
    moment_stride,
    length,
    eps,
    HAS_DY: tl.constexpr,
    NEEDS_OUT: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_S: tl.constexpr,
    FOLD: tl.constexpr,
    ENTRIES: tl.constexpr,
    EVEN: tl.constexpr,
):
    # `ahead` tiles are reduced, then in turn one more is reduced and one written, then the last
    # `ahead` are written. state: the next ticket, each group's tiles reduced, and its statistics
    # ready. Tickets, and not the program's number, because a GPU promises no order of programs;
    # they cost 3%.
    ticket = tl.atomic_add(state_ptr, 1, sem="relaxed")
    total = groups * tiles
    turn = ticket - ahead
    turns = 2 * (total - ahead)
    if (turn < 0) | ((turn < turns) & (turn % 2 == 0)):
        _reduce(
            dy_ptr,
            x_ptr,
            weight_ptr,
            moments_ptr,
            statistics_ptr,
            state_ptr,
            tl.where(turn < 0, ticket, ahead + turn // 2),
            tiles,
            G,
            C_G,
            S,
            groups,
            pieces,
            moment_stride,
            length,
            eps,
            HAS_DY,
            HAS_WEIGHT,
            BLOCK_C,
            BLOCK_S,
            FOLD,
            ENTRIES,
            EVEN,
        )
    elif NEEDS_OUT:
        _apply(
            dy_ptr,
            x_ptr,
            weight_ptr,
            bias_ptr,
            out_ptr,
            statistics_ptr,
            state_ptr,
            tl.where(turn < turns, turn // 2, ticket - total),
            tiles,
            G,
            C_G,
            S,
            groups,
            pieces,
            HAS_DY,
            HAS_WEIGHT,
            HAS_BIAS,
            BLOCK_C,
            BLOCK_S,
            EVEN,
        )


@triton.jit(do_not_specialize=["P"])
def group_sums_kernel(
    moments_ptr,
    statistics_ptr,
    dweight_ptr,
    dbias_ptr,
    P,
    G,
    C_G,
    groups,
    pieces,
    moment_stride,
    NEEDS_DWEIGHT: tl.constexpr,
    NEEDS_DBIAS: tl.constexpr,
    DEPENDENT: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    # The gradients of channels, from the moments of the P = samples x pieces parts of each.
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
