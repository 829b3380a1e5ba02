"""group_norm.

A group that fits in a tile is one program's, in one pass over memory; for others see group_walk
and group_pieces.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ... import library
from ..tensors import contiguous
from . import group_pieces, group_walk
from .group_plan import grouped, per_channel
from .launch import launch
from .partial_sums import partial_sums, summed


@triton.jit
def _group_norm_kernel(
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
):
    group = tl.program_id(0).to(tl.int64)
    channels = tl.arange(0, BLOCK_C)[:, None]
    positions = tl.arange(0, BLOCK_S)[None, :]
    mask = (channels < C_G) & (positions < S)
    offsets = (group * C_G + channels) * S + positions
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    centred = tl.where(mask, x - tl.sum(x) / length, 0.0)
    y = centred * tl.rsqrt(tl.sum(centred * centred) / length + eps)
    if HAS_WEIGHT:
        y *= per_channel(weight_ptr, channels, group, G, C_G)
    if HAS_BIAS:
        y += per_channel(bias_ptr, channels, group, G, C_G)
    tl.store(y_ptr + offsets, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _group_norm_backward_kernel(
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
):
    group = tl.program_id(0).to(tl.int64)
    channels = tl.arange(0, BLOCK_C)[:, None]
    positions = tl.arange(0, BLOCK_S)[None, :]
    mask = (channels < C_G) & (positions < S)
    offsets = (group * C_G + channels) * S + positions
    dy = tl.load(dy_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    sums = group * C_G + channels
    if NEEDS_DBIAS:
        tl.store(dbias_ptr + sums, tl.sum(dy, 1)[:, None], mask=channels < C_G)
    if NEEDS_DX or NEEDS_DWEIGHT:
        x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        centred = tl.where(mask, x - tl.sum(x) / length, 0.0)
        rstd = tl.rsqrt(tl.sum(centred * centred) / length + eps)
        xhat = centred * rstd
        if NEEDS_DWEIGHT:
            tl.store(dweight_ptr + sums, tl.sum(dy * xhat, 1)[:, None], mask=channels < C_G)
        if NEEDS_DX:
            g = dy
            if HAS_WEIGHT:
                g = dy * per_channel(weight_ptr, channels, group, G, C_G)
            dx = rstd * (g - tl.sum(g) / length - xhat * (tl.sum(g * xhat) / length))
            tl.store(dx_ptr + offsets, dx.to(dx_ptr.dtype.element_ty), mask=mask)


@library.kernel("group_norm", "cuda")
def group_norm(call, y, plan):
    x, weight, bias = map(contiguous, (call.x, call.weight, call.bias))
    shape = grouped(x, call.num_groups, plan, False)
    if shape.plan.ahead:
        group_pieces.run(None, x, weight, bias, y, shape, call.eps)
        return
    kernel, options = _group_norm_kernel, {}
    if shape.walked:
        kernel, options = group_walk.group_walk_kernel, group_walk.options(x, shape, False)
    launch(
        kernel,
        (shape.programs,),
        x,
        x,
        weight,
        bias,
        y,
        shape.G,
        shape.C_G,
        shape.S,
        shape.length,
        call.eps,
        HAS_WEIGHT=weight is not None,
        HAS_BIAS=bias is not None,
        **options,
        **shape.tile,
    )


@library.kernel("group_norm_backward", "cuda")
def group_norm_backward(call, dx, dweight, dbias, plan):
    x, dy, weight = map(contiguous, (call.x, call.dy, call.weight))
    shape = grouped(x, call.num_groups, plan, True)
    if shape.plan.ahead:
        parts = group_pieces.run(dy, x, weight, None, dx, shape, call.eps)
        group_pieces.channel_gradients(parts, dweight, dbias, shape)
        return
    kernel, options = _group_norm_backward_kernel, {}
    if shape.walked:
        kernel, options = group_walk.group_walk_backward_kernel, group_walk.options(x, shape, True)
    dweights = partial_sums(dweight, x.shape[0])
    dbiases = partial_sums(dbias, x.shape[0])
    launch(
        kernel,
        (shape.programs,),
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
        call.eps,
        HAS_WEIGHT=weight is not None,
        NEEDS_DX=dx is not None,
        NEEDS_DWEIGHT=dweight is not None,
        NEEDS_DBIAS=dbias is not None,
        **options,
        **shape.tile,
    )
    summed((dweights, dweight), (dbiases, dbias))
