"""group_norm's forward of groups that fit in the L2 cache but not in registers: each is walked
twice."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..sizes import cdiv
from ..triton_math import folded
from .group_plan import Groups, per_channel
from .launch import launch


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
    FOLD: tl.constexpr,
):
    group = tl.program_id(0).to(tl.int64)
    x_ptr += group * C_G * S
    y_ptr += group * C_G * S
    tiles = tl.cdiv(C_G, BLOCK_C) * PARTS
    shift = _first_mean(x_ptr, C_G, S, BLOCK_C, BLOCK_S)
    sums = tl.zeros((BLOCK_C * BLOCK_S // FOLD,), tl.float32)
    squares = tl.zeros((BLOCK_C * BLOCK_S // FOLD,), tl.float32)
    for tile in tl.range(0, tiles, num_stages=1):
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
    for back in tl.range(0, tiles, num_stages=1):
        channels, offsets, mask = _tile(tiles - 1 - back, C_G, S, PARTS, BLOCK_C, BLOCK_S)
        x = tl.load(x_ptr + offsets, mask=mask, other=0.0, eviction_policy="evict_first")
        scale = rstd
        if HAS_WEIGHT:
            scale *= per_channel(weight_ptr, channels, group, G, C_G)
        y = (x.to(tl.float32) - mean) * scale
        if HAS_BIAS:
            y += per_channel(bias_ptr, channels, group, G, C_G)
        tl.store(y_ptr + offsets, y.to(y_ptr.dtype.element_ty), mask=mask)


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
        FOLD=min(8, shape.plan.BLOCK_C * shape.plan.BLOCK_S),
        **shape.tile,
    )
