"""group_norm: the choice of a plan, and the kernels of whole groups, which a program reads once and
holds in registers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ..... import library
from ....common.tensors import contiguous, next_power_of_2
from ...launch import launch
from ...sums import partial_sums, summed
from .group_cached import Walk, launch_walk, plan_walk
from .group_pieces import Pieces, launch_channel_gradients, launch_pieces, plan_pieces
from .group_plan import GroupedShape, GroupPlan, per_channel


@triton.jit
def _tile(group, C_G, S, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr):
    """Return the channels of a group's tile, the offsets of its elements, and their mask."""
    channels = tl.arange(0, BLOCK_C)[:, None]
    positions = tl.arange(0, BLOCK_S)[None, :]
    mask = (channels < C_G) & (positions < S)
    return channels, (group * C_G + channels) * S + positions, mask


@triton.jit
def group_norm_kernel(
    x_ptr, weight_ptr, bias_ptr, y_ptr, G, C_G, S, length, eps,
    HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0).to(tl.int64)
    channels, offsets, mask = _tile(group, C_G, S, BLOCK_C, BLOCK_S)
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    centred = tl.where(mask, x - tl.sum(x) / length, 0.0)
    y = centred * tl.rsqrt(tl.sum(centred * centred) / length + eps)
    if HAS_WEIGHT:
        y *= per_channel(weight_ptr, channels, group, G, C_G)
    if HAS_BIAS:
        y += per_channel(bias_ptr, channels, group, G, C_G)
    tl.store(y_ptr + offsets, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def group_norm_backward_kernel(
    dy_ptr, x_ptr, weight_ptr, dx_ptr, dweight_ptr, dbias_ptr, G, C_G, S, length, eps,
    HAS_WEIGHT: tl.constexpr, NEEDS_DX: tl.constexpr, NEEDS_DWEIGHT: tl.constexpr,
    NEEDS_DBIAS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0).to(tl.int64)
    channels, offsets, mask = _tile(group, C_G, S, BLOCK_C, BLOCK_S)
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


@dataclass(frozen=True)
class WholeGroup(GroupPlan):
    """A program has a group, and the group one tile."""


# The largest groups that one program holds, in elements of the padded tile. In ms on an H200, held
# whole and walked: forward, 2048 groups of 8192 0.023 and 0.024, of 32768 0.084 and 0.074;
# backward, of 8192 0.070 and 0.039.
WHOLE_GROUP = 8192
WHOLE_GROUP_BACKWARD = 4096


def plan_whole_group(shape: GroupedShape, backward: bool) -> WholeGroup | None:
    """Plan a tile for the whole group, or return None if the group is too large."""
    BLOCK_C, BLOCK_S = next_power_of_2(shape.C_G), next_power_of_2(shape.S)
    tile = BLOCK_C * BLOCK_S
    if tile > (WHOLE_GROUP_BACKWARD if backward else WHOLE_GROUP):
        return None
    return WholeGroup(BLOCK_C, BLOCK_S, min(1024, max(128, tile // 16)))


def launch_whole_group(
    plan: WholeGroup, shape: GroupedShape, x: Tensor, backward: bool, *args: Any, **options: Any
) -> None:
    kernel = group_norm_backward_kernel if backward else group_norm_kernel
    launch(kernel, (shape.groups,), x, *args, **options, **plan.options)


def plan_group(x: Tensor, shape: GroupedShape, backward: bool) -> WholeGroup | Walk | Pieces:
    """Plan whole groups if they fit in registers, else a walk if the cache holds them, else
    pieces."""
    return (
        plan_whole_group(shape, backward)
        or plan_walk(x, shape, backward)
        or plan_pieces(x, shape, backward)
    )


@library.kernel("group_norm", "cuda")
def group_norm(call, y, plan):
    x, weight, bias = map(contiguous, (call.x, call.weight, call.bias))
    shape = GroupedShape.of(x, call.num_groups)
    plan = plan or plan_group(x, shape, False)
    if isinstance(plan, Pieces):
        launch_pieces(plan, shape, None, x, weight, bias, y, call.eps)
        return
    arguments = (x, weight, bias, y, *shape.arguments, call.eps)
    options = {"HAS_WEIGHT": weight is not None, "HAS_BIAS": bias is not None}
    launch_group = launch_whole_group if isinstance(plan, WholeGroup) else launch_walk
    launch_group(plan, shape, x, False, *arguments, **options)


@library.kernel("group_norm_backward", "cuda")
def group_norm_backward(call, dx, dweight, dbias, plan):
    x, dy, weight = map(contiguous, (call.x, call.dy, call.weight))
    shape = GroupedShape.of(x, call.num_groups)
    plan = plan or plan_group(x, shape, True)
    if isinstance(plan, Pieces):
        moments = launch_pieces(plan, shape, dy, x, weight, None, dx, call.eps)
        launch_channel_gradients(moments, dweight, dbias, shape)
        return
    dweights = partial_sums(dweight, x.shape[0])
    dbiases = partial_sums(dbias, x.shape[0])
    arguments = (dy, x, weight, dx, dweights, dbiases, *shape.arguments, call.eps)
    options = {
        "HAS_WEIGHT": weight is not None,
        "NEEDS_DX": dx is not None,
        "NEEDS_DWEIGHT": dweight is not None,
        "NEEDS_DBIAS": dbias is not None,
    }
    launch_group = launch_whole_group if isinstance(plan, WholeGroup) else launch_walk
    launch_group(plan, shape, x, True, *arguments, **options)
    summed((dweights, dweight), (dbiases, dbias))
