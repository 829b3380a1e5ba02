"""group_norm of groups that fit in the L2 cache but not in registers: each is walked twice."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..sizes import cdiv
from ..triton_math import folded
from .group_plan import Groups, per_channel
from .launch import launch
from .partial_sums import partial_sums, summed


@triton.jit
def _tile(tile, C_G, S, PARTS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr):
    # The channels, offsets in the group, and mask of a tile. Offsets are int32: a walked group is
    # small, and int64 ones would cost a third of the speed.
    channels = tile // PARTS * BLOCK_C + tl.arange(0, BLOCK_C)[:, None]
    positions = tile % PARTS * BLOCK_S + tl.arange(0, BLOCK_S)[None, :]
    mask = (channels < C_G) & (positions < S)
    return channels, channels * S + positions, mask


@triton.jit
def _first_mean(x_ptr, C_G, S, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr):
    # The mean of the first of T tiles: sums of squares about it lose at most a factor of T in
    # precision, whatever the group's own mean is.
    _channels, offsets, mask = _tile(0, C_G, S, 1, BLOCK_C, BLOCK_S)
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    return tl.sum(x) / (tl.minimum(C_G, BLOCK_C) * tl.minimum(S, BLOCK_S)).to(tl.float32)


@triton.jit
def _group_walk_kernel(
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
    STAGES: tl.constexpr,
    FOLD: tl.constexpr,
):
    group = tl.program_id(0).to(tl.int64)
    x_ptr += group * C_G * S
    y_ptr += group * C_G * S
    tiles = tl.cdiv(C_G, BLOCK_C) * PARTS
    shift = _first_mean(x_ptr, C_G, S, BLOCK_C, BLOCK_S)
    sums = tl.zeros((BLOCK_C * BLOCK_S // FOLD,), tl.float32)
    squares = tl.zeros((BLOCK_C * BLOCK_S // FOLD,), tl.float32)
    for tile in tl.range(0, tiles, num_stages=STAGES):
        _channels, offsets, mask = _tile(tile, C_G, S, PARTS, BLOCK_C, BLOCK_S)
        x = tl.load(x_ptr + offsets, mask=mask, other=0.0, eviction_policy="evict_last")
        x = tl.where(mask, x.to(tl.float32) - shift, 0.0)
        sums += folded(x, FOLD)
        squares += folded(x * x, FOLD)
    step = tl.sum(sums, 0) / length
    mean = shift + step
    variance = tl.maximum(tl.sum(squares, 0) / length - step * step, 0.0)
    rstd = tl.rsqrt(variance + eps)
    # The last tiles first: they are the likeliest to be in the caches still.
    for back in tl.range(0, tiles, num_stages=STAGES):
        channels, offsets, mask = _tile(tiles - 1 - back, C_G, S, PARTS, BLOCK_C, BLOCK_S)
        x = tl.load(x_ptr + offsets, mask=mask, other=0.0, eviction_policy="evict_first")
        scale = rstd
        if HAS_WEIGHT:
            scale *= per_channel(weight_ptr, channels, group, G, C_G)
        y = (x.to(tl.float32) - mean) * scale
        if HAS_BIAS:
            y += per_channel(bias_ptr, channels, group, G, C_G)
        tl.store(y_ptr + offsets, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _group_walk_backward_kernel(
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
    PARTS: tl.constexpr,
    STAGES: tl.constexpr,
    FOLD: tl.constexpr,
):
    group = tl.program_id(0).to(tl.int64)
    x_ptr += group * C_G * S
    dy_ptr += group * C_G * S
    if NEEDS_DX:
        dx_ptr += group * C_G * S
    tiles = tl.cdiv(C_G, BLOCK_C) * PARTS
    shift = _first_mean(x_ptr, C_G, S, BLOCK_C, BLOCK_S)
    sums = tl.zeros((BLOCK_C * BLOCK_S // FOLD,), tl.float32)
    squares = tl.zeros((BLOCK_C * BLOCK_S // FOLD,), tl.float32)
    sums_g = tl.zeros((BLOCK_C * BLOCK_S // FOLD,), tl.float32)
    products = tl.zeros((BLOCK_C * BLOCK_S // FOLD,), tl.float32)
    for tile in tl.range(0, tiles, num_stages=STAGES):
        channels, offsets, mask = _tile(tile, C_G, S, PARTS, BLOCK_C, BLOCK_S)
        x = tl.load(x_ptr + offsets, mask=mask, other=0.0, eviction_policy="evict_last")
        g = tl.load(dy_ptr + offsets, mask=mask, other=0.0, eviction_policy="evict_last")
        x = tl.where(mask, x.to(tl.float32) - shift, 0.0)
        g = g.to(tl.float32)
        if HAS_WEIGHT:
            g *= per_channel(weight_ptr, channels, group, G, C_G)
        sums += folded(x, FOLD)
        squares += folded(x * x, FOLD)
        sums_g += folded(g, FOLD)
        products += folded(g * x, FOLD)
    step = tl.sum(sums, 0) / length
    mean = shift + step
    variance = tl.maximum(tl.sum(squares, 0) / length - step * step, 0.0)
    rstd = tl.rsqrt(variance + eps)
    mean_g = tl.sum(sums_g, 0) / length
    projection = (tl.sum(products, 0) / length - step * mean_g) * rstd
    # A row of partial sums for every sample and part of the positions.
    row = (group // G) * PARTS * G * C_G + (group % G) * C_G
    for back in tl.range(0, tiles, num_stages=STAGES):
        tile = tiles - 1 - back
        channels, offsets, mask = _tile(tile, C_G, S, PARTS, BLOCK_C, BLOCK_S)
        x = tl.load(x_ptr + offsets, mask=mask, other=0.0, eviction_policy="evict_first")
        dy = tl.load(dy_ptr + offsets, mask=mask, other=0.0, eviction_policy="evict_first")
        xhat = (x.to(tl.float32) - mean) * rstd
        g = dy.to(tl.float32)
        at = row + (tile % PARTS) * G * C_G + channels
        if NEEDS_DBIAS:
            tl.store(dbias_ptr + at, tl.sum(g, 1)[:, None], mask=channels < C_G)
        if NEEDS_DWEIGHT:
            tl.store(dweight_ptr + at, tl.sum(g * xhat, 1)[:, None], mask=channels < C_G)
        if NEEDS_DX:
            if HAS_WEIGHT:
                g *= per_channel(weight_ptr, channels, group, G, C_G)
            dx = rstd * (g - mean_g - xhat * projection)
            tl.store(dx_ptr + offsets, dx.to(dx_ptr.dtype.element_ty), mask=mask)


def forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    y: Tensor,
    shape: Groups,
    eps: float,
) -> None:
    launch(
        _group_walk_kernel,
        (shape.groups,),
        x,
        x,
        weight,
        bias,
        y,
        shape.G,
        shape.C_G,
        shape.S,
        shape.length,
        eps,
        HAS_WEIGHT=weight is not None,
        HAS_BIAS=bias is not None,
        PARTS=cdiv(shape.S, shape.plan.BLOCK_S),
        STAGES=shape.plan.stages,
        FOLD=min(8, shape.plan.BLOCK_C * shape.plan.BLOCK_S),
        **shape.tile,
    )


def backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    dx: Tensor | None,
    dweight: Tensor | None,
    dbias: Tensor | None,
    shape: Groups,
    eps: float,
) -> None:
    parts = x.shape[0] * cdiv(shape.S, shape.plan.BLOCK_S)
    dweights = partial_sums(dweight, parts)
    dbiases = partial_sums(dbias, parts)
    launch(
        _group_walk_backward_kernel,
        (shape.groups,),
        x,
        dy,
        x,
        weight,
        dx,
        dweights,
        dbiases,
        shape.G,
        shape.C_G,
        shape.S,
        shape.length,
        eps,
        HAS_WEIGHT=weight is not None,
        NEEDS_DX=dx is not None,
        NEEDS_DWEIGHT=dweight is not None,
        NEEDS_DBIAS=dbias is not None,
        PARTS=cdiv(shape.S, shape.plan.BLOCK_S),
        STAGES=shape.plan.stages,
        FOLD=min(8, shape.plan.BLOCK_C * shape.plan.BLOCK_S),
        **shape.tile,
    )
    summed(dweights, dweight)
    summed(dbiases, dbias)
