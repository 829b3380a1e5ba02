"""group_norm of groups too large, or too few, for a program each.

Moments of pieces of channels, then statistics of groups, then the elementwise rest.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..sizes import cdiv
from ..triton_math import lane_counts, lanes_updated
from .group_plan import Groups, per_channel
from .launch import launch


@triton.jit
def _place(C_G, parts, BLOCK_C: tl.constexpr):
    # One grid dimension, whose limit is 2**31, for groups x blocks of channels x parts of the
    # positions.
    program = tl.program_id(0).to(tl.int64)
    blocks = tl.cdiv(C_G, BLOCK_C)
    part = program % parts
    block = (program // parts) % blocks
    group = program // parts // blocks
    return group, (block * BLOCK_C + tl.arange(0, BLOCK_C))[:, None], part


@triton.jit
def _group_moments_kernel(
    dy_ptr,
    x_ptr,
    moments_ptr,
    C_G,
    S,
    piece,
    pieces,
    moment_stride,
    HAS_DY: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    # For a piece of the positions of each of BLOCK_C channels: mean, squared deviations, and of dy
    # the sum and the sum of dy * (x - mean), corrected whenever a lane's mean moves.
    group, channels, part = _place(C_G, pieces, BLOCK_C)
    start = part * piece
    length = tl.minimum(S - start, piece)
    lanes = tl.arange(0, BLOCK_S)[None, :]
    base = (group * C_G + channels) * S + start
    mean = tl.zeros((BLOCK_C, BLOCK_S), tl.float32)
    m2 = tl.zeros((BLOCK_C, BLOCK_S), tl.float32)
    sum_dy = tl.zeros((BLOCK_C, BLOCK_S), tl.float32)
    product = tl.zeros((BLOCK_C, BLOCK_S), tl.float32)
    for tile in range(0, tl.cdiv(piece, BLOCK_S)):
        positions = tile * BLOCK_S + lanes
        mask = (channels < C_G) & (positions < length)
        x = tl.load(x_ptr + base + positions, mask=mask, other=0.0).to(tl.float32)
        before = mean
        mean, m2 = lanes_updated(x, mask, tile, mean, m2)
        if HAS_DY:
            dy = tl.load(dy_ptr + base + positions, mask=mask, other=0.0).to(tl.float32)
            product += dy * (x - mean) - sum_dy * (mean - before)
            sum_dy += dy
    counts = lane_counts(lanes, length, BLOCK_S)
    channel_mean = tl.sum(mean * counts, 1)[:, None] / length.to(tl.float32)
    deviation = mean - channel_mean
    at = moments_ptr + (group * C_G + channels) * pieces + part
    tl.store(at, channel_mean, mask=channels < C_G)
    squares = tl.sum(m2 + counts * deviation * deviation, 1)[:, None]
    tl.store(at + moment_stride, squares, mask=channels < C_G)
    if HAS_DY:
        tl.store(at + 2 * moment_stride, tl.sum(sum_dy, 1)[:, None], mask=channels < C_G)
        products = tl.sum(product + sum_dy * deviation, 1)[:, None]
        tl.store(at + 3 * moment_stride, products, mask=channels < C_G)


@triton.jit
def _group_statistics_kernel(
    moments_ptr,
    weight_ptr,
    statistics_ptr,
    dweight_ptr,
    G,
    C_G,
    S,
    piece,
    pieces,
    moment_stride,
    groups,
    length,
    eps,
    HAS_DY: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    NEEDS_DWEIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # A group's mean, rstd, mean(g) and mean(g * xhat) from the moments of its pieces; and each
    # piece's part of the gradient of weight.
    group = tl.program_id(0).to(tl.int64)
    entries = C_G * pieces
    base = moments_ptr + group * entries
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, entries, BLOCK):
        entry = start + tl.arange(0, BLOCK)
        count = tl.minimum(S - (entry % pieces) * piece, piece).to(tl.float32)
        total += tl.load(base + entry, mask=entry < entries, other=0.0) * count
    mean = tl.sum(total, 0) / length
    squares = tl.zeros((BLOCK,), tl.float32)
    sum_g = tl.zeros((BLOCK,), tl.float32)
    product = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, entries, BLOCK):
        entry = start + tl.arange(0, BLOCK)
        mask = entry < entries
        count = tl.minimum(S - (entry % pieces) * piece, piece).to(tl.float32)
        deviation = tl.load(base + entry, mask=mask, other=0.0) - mean
        m2 = tl.load(base + moment_stride + entry, mask=mask, other=0.0)
        squares += tl.where(mask, m2 + count * deviation * deviation, 0.0)
        if HAS_DY:
            dy = tl.load(base + 2 * moment_stride + entry, mask=mask, other=0.0)
            dyx = tl.load(base + 3 * moment_stride + entry, mask=mask, other=0.0) + dy * deviation
            if HAS_WEIGHT:
                channel = (group % G) * C_G + entry // pieces
                weight = tl.load(weight_ptr + channel, mask=mask, other=0.0).to(tl.float32)
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
    if NEEDS_DWEIGHT:
        for start in range(0, entries, BLOCK):
            entry = start + tl.arange(0, BLOCK)
            mask = entry < entries
            deviation = tl.load(base + entry, mask=mask, other=0.0) - mean
            dy = tl.load(base + 2 * moment_stride + entry, mask=mask, other=0.0)
            dyx = tl.load(base + 3 * moment_stride + entry, mask=mask, other=0.0)
            part = (dyx + dy * deviation) * rstd
            tl.store(dweight_ptr + group * entries + entry, part, mask=mask)


@triton.jit
def _group_apply_kernel(
    dy_ptr,
    x_ptr,
    weight_ptr,
    bias_ptr,
    statistics_ptr,
    out_ptr,
    G,
    C_G,
    S,
    groups,
    BACKWARD: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    # y, or for BACKWARD dx, of one tile, with the group's statistics known.
    group, channels, part = _place(C_G, tl.cdiv(S, BLOCK_S), BLOCK_C)
    positions = part * BLOCK_S + tl.arange(0, BLOCK_S)[None, :]
    mask = (channels < C_G) & (positions < S)
    offsets = (group * C_G + channels) * S + positions
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    mean = tl.load(statistics_ptr + group)
    rstd = tl.load(statistics_ptr + groups + group)
    xhat = (x - mean) * rstd
    if BACKWARD:
        g = tl.load(dy_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        if HAS_WEIGHT:
            g *= per_channel(weight_ptr, channels, group, G, C_G)
        mean_g = tl.load(statistics_ptr + 2 * groups + group)
        projection = tl.load(statistics_ptr + 3 * groups + group)
        out = rstd * (g - mean_g - xhat * projection)
    else:
        out = xhat
        if HAS_WEIGHT:
            out *= per_channel(weight_ptr, channels, group, G, C_G)
        if HAS_BIAS:
            out += per_channel(bias_ptr, channels, group, G, C_G)
    tl.store(out_ptr + offsets, out.to(out_ptr.dtype.element_ty), mask=mask)


def statistics(
    dy: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    shape: Groups,
    eps: float,
    needs_dweight: bool,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """The groups' statistics; the pieces' parts of dweight, and of dbias, each (N, C, pieces)."""
    # Pieces of whole tiles: fewer pieces than planned may then be enough.
    tiles = cdiv(shape.S, shape.plan.BLOCK_S)
    piece = cdiv(tiles, shape.plan.pieces) * shape.plan.BLOCK_S
    pieces = cdiv(shape.S, piece)
    rows = 2 if dy is None else 4
    moments = x.new_empty((rows, *x.shape[:2], pieces), dtype=torch.float32)
    launch(
        _group_moments_kernel,
        (shape.channel_blocks * pieces,),
        x,
        dy,
        x,
        moments,
        shape.C_G,
        shape.S,
        piece,
        pieces,
        moments.stride(0),
        HAS_DY=dy is not None,
        **shape.tile,
    )
    values = x.new_empty((rows, shape.groups), dtype=torch.float32)
    dweight = torch.empty_like(moments[0]) if needs_dweight else None
    launch(
        _group_statistics_kernel,
        (shape.groups,),
        x,
        moments,
        weight,
        values,
        dweight,
        shape.G,
        shape.C_G,
        shape.S,
        piece,
        pieces,
        moments.stride(0),
        shape.groups,
        shape.length,
        eps,
        HAS_DY=dy is not None,
        HAS_WEIGHT=weight is not None,
        NEEDS_DWEIGHT=needs_dweight,
        BLOCK=1024,
    )
    return values, dweight, moments[-2]


def apply(
    dy: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    statistics: Tensor,
    out: Tensor,
    shape: Groups,
) -> None:
    launch(
        _group_apply_kernel,
        (shape.channel_blocks * cdiv(shape.S, shape.plan.BLOCK_S),),
        x,
        dy,
        x,
        weight,
        bias,
        statistics,
        out,
        shape.G,
        shape.C_G,
        shape.S,
        shape.groups,
        BACKWARD=dy is not None,
        HAS_WEIGHT=weight is not None,
        HAS_BIAS=bias is not None,
        **shape.tile,
    )
