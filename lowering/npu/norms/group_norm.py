"""group_norm. A group that fits a tile is read once. A group that fits the Unified Buffer in its
own dtype stays there, a tile of all channels, and is computed in float32 a few channels at a time.
group_pieces has the kernels for other groups. If a sample is one group with one position, it is a
row of layer_norm.

x is (groups, C_G, S): the channels of a group and their positions. A tile is (channels, positions)
or, if S is 1, flat: (1, channels).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .... import library
from ...common.norms.backward import backward_of
from ...common.tensors import contiguous
from .. import tiling
from ..partial_sums import partial_sums, summed
from ..tile import load, remaining, tile_offsets, within
from ..tiling import COSTS, Cost, GroupShape, Kept, Plan, launch
from . import group_pieces, layer_norm
from .norm_backward import NormBackward
from .resident_rows import channels_of


@triton.jit
def _kept_group(ptr, C_G, S, CHANNELS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Load a group as (CHANNELS, BLOCK_N), in its own dtype, with 0 beyond it."""
    channels, positions, offsets = tile_offsets(S, CHANNELS, BLOCK_N)
    return tl.load(ptr + offsets, mask=(channels < C_G) & (positions < S), other=0.0)


@triton.jit
def _kept_sum(x):
    return tl.sum(tl.sum(x, axis=1)[:, None], axis=0)[None, :]


@triton.jit
def _statistics(
    x_tile, rows, cols, C_G, S, length, eps,
    PADDED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Return the mean and rstd of a kept group, (1, 1) each."""
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for channel in tl.range(0, C_G, BLOCK_M):
        sums += channels_of(x_tile, channel, BLOCK_M)
    mean = _kept_sum(sums) / length
    squares = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for channel in tl.range(0, C_G, BLOCK_M):
        centred = channels_of(x_tile, channel, BLOCK_M) - mean
        if PADDED:
            # Elements beyond the group are -mean now, and would count in the squares.
            centred *= within(rows, C_G - channel) * within(cols, S)
        squares += centred * centred
    return mean, tl.rsqrt(_kept_sum(squares) / length + eps)


@triton.jit(do_not_specialize=["groups"])
def _kept_group_norm_kernel(
    x_ptr, weight_ptr, bias_ptr, y_ptr, groups, G, C_G, S, length, eps,
    PADDED: tl.constexpr, CHANNELS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    rows, cols, offsets = tile_offsets(S, BLOCK_M, BLOCK_N)
    for group in tl.range(tl.program_id(0).to(tl.int64), groups, tl.num_programs(0)):
        start = group * C_G * S
        x_tile = _kept_group(x_ptr + start, C_G, S, CHANNELS, BLOCK_N)
        mean, rstd = _statistics(x_tile, rows, cols, C_G, S, length, eps, PADDED, BLOCK_M, BLOCK_N)
        first = (group % G) * C_G
        for channel in tl.range(0, C_G, BLOCK_M):
            row_mask = rows < remaining(C_G, channel, BLOCK_M)
            y = (channels_of(x_tile, channel, BLOCK_M) - mean) * rstd
            if weight_ptr is not None:
                y = y * load(weight_ptr + first + channel, rows, row_mask)
            if bias_ptr is not None:
                y = y + load(bias_ptr + first + channel, rows, row_mask)
            at = y_ptr + start + channel * S + offsets
            tl.store(at, y.to(y_ptr.dtype.element_ty), mask=row_mask & (cols < S))


@triton.jit(do_not_specialize=["groups"])
def _kept_group_norm_backward_kernel(
    dy_ptr, x_ptr, weight_ptr, dx_ptr, dweight_ptr, dbias_ptr, groups, G, C_G, S, length, eps,
    PADDED: tl.constexpr, CHANNELS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # The partial sums of dweight and dbias have a row for each sample: no two programs share one.
    rows, cols, offsets = tile_offsets(S, BLOCK_M, BLOCK_N)
    for group in tl.range(tl.program_id(0).to(tl.int64), groups, tl.num_programs(0)):
        start = group * C_G * S
        dy_tile = _kept_group(dy_ptr + start, C_G, S, CHANNELS, BLOCK_N)
        x_tile = _kept_group(x_ptr + start, C_G, S, CHANNELS, BLOCK_N)
        mean, rstd = _statistics(x_tile, rows, cols, C_G, S, length, eps, PADDED, BLOCK_M, BLOCK_N)
        first = (group % G) * C_G
        sum_g = tl.zeros((BLOCK_M, 1), tl.float32)
        sum_product = tl.zeros((BLOCK_M, 1), tl.float32)
        for channel in tl.range(0, C_G, BLOCK_M):
            row_mask = rows < remaining(C_G, channel, BLOCK_M)
            dy = channels_of(dy_tile, channel, BLOCK_M)
            xhat = (channels_of(x_tile, channel, BLOCK_M) - mean) * rstd
            sum_dy = tl.sum(dy, axis=1)[:, None]
            product = tl.sum(dy * xhat, axis=1)[:, None]
            if dweight_ptr is not None:
                tl.store(dweight_ptr + group * C_G + channel + rows, product, mask=row_mask)
            if dbias_ptr is not None:
                tl.store(dbias_ptr + group * C_G + channel + rows, sum_dy, mask=row_mask)
            if weight_ptr is not None:
                weight = load(weight_ptr + first + channel, rows, row_mask)
                sum_dy *= weight
                product *= weight
            sum_g += sum_dy
            sum_product += product
        if dx_ptr is not None:
            mean_g = tl.sum(sum_g, axis=0)[None, :] / length
            projection = tl.sum(sum_product, axis=0)[None, :] / length
            for channel in tl.range(0, C_G, BLOCK_M):
                row_mask = rows < remaining(C_G, channel, BLOCK_M)
                g = channels_of(dy_tile, channel, BLOCK_M)
                if weight_ptr is not None:
                    g = g * load(weight_ptr + first + channel, rows, row_mask)
                xhat = (channels_of(x_tile, channel, BLOCK_M) - mean) * rstd
                dx = (g - mean_g - xhat * projection) * rstd
                at = dx_ptr + start + channel * S + offsets
                tl.store(at, dx.to(dx_ptr.dtype.element_ty), mask=row_mask & (cols < S))


def launch_kept(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, y: Tensor,
    shape: GroupShape, eps: float, plan: Plan,
) -> None:  # fmt: skip
    """Launch the forward for kept groups."""
    launch(
        _kept_group_norm_kernel, plan, shape.groups,
        x, weight, bias, y,
        shape.groups, shape.G, shape.C_G, shape.S, shape.length, eps,
        **shape.kept_layout(plan),
    )  # fmt: skip


def launch_kept_backward(
    dy: Tensor, x: Tensor, weight: Tensor | None,
    dx: Tensor | None, dweight: Tensor | None, dbias: Tensor | None,
    shape: GroupShape, eps: float, plan: Plan,
) -> None:  # fmt: skip
    """Launch the backward for kept groups."""
    dweights, dbiases = partial_sums(dweight, shape.batch), partial_sums(dbias, shape.batch)
    launch(
        _kept_group_norm_backward_kernel, plan, shape.groups,
        dy, x, weight, dx, dweights, dbiases,
        shape.groups, shape.G, shape.C_G, shape.S, shape.length, eps,
        **shape.kept_layout(plan),
    )  # fmt: skip
    summed(dweights, dweight)
    summed(dbiases, dbias)


# whole 4096 elements: 84.9% | 76.6%. wide (1, 4096): 75.1% | 75.1%.
# kept (64, 256) in pieces of 1024: 53.3% | 84.5%, (32, 1024) of 1024: 87.7%.
COSTS["group_norm"] = Cost(
    {2: 41.0, 4: 37.0}, {2: 36.1, 4: 36.1}, kept=(Kept({2: 4.14, 4: 8.14}, {2: 38.4, 4: 34.3}),)
)
# whole 4096 elements: 76.1% | 67.9%, flat 95.9% | overflow.
# wide (1, 2048): 85.6%, (1, 4096): overflow.
# kept (16, 512) in pieces of 1024: 62.2% | 98.6%, (64, 256) of 1024: 95.0% | overflow.
COSTS["group_norm_backward"] = Cost(
    {2: 37.0, 4: 33.0}, {2: 82.3, 4: 82.3}, kept=(Kept({2: 8.2, 4: 16.2}, {2: 54.3, 4: 60.0}),)
)


@triton.jit
def _channel_sums(x, FLAT: tl.constexpr):
    """Sum each channel of a tile over its positions."""
    if FLAT:
        return tl.sum(x, axis=0)[None, :]
    else:
        return tl.sum(x, axis=1)[:, None]


@triton.jit
def _group_sum(x):
    return tl.sum(tl.sum(x, axis=1), axis=0)


@triton.jit
def _standardised(x, inside, length, eps, PADDED: tl.constexpr):
    """Return xhat and rstd of a group; `inside` is 1.0 for its elements, else 0.0."""
    centred = x - _group_sum(x) / length
    if PADDED:
        # Elements beyond the group are -mean now, and would count in the variance.
        centred = centred * inside
    rstd = tl.rsqrt(_group_sum(centred * centred) / length + eps)
    return centred * rstd, rstd


@triton.jit
def _tile(C_G, S, FLAT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return a group tile's channels, its elements' offsets, and its mask as booleans and as 1.0
    and 0.0."""
    channels = tl.arange(0, BLOCK_M)[:, None]
    positions = tl.arange(0, BLOCK_N)[None, :]
    if FLAT:
        channels, positions = positions, channels
    mask = (channels < C_G) & (positions < S)
    return channels, channels * S + positions, mask, within(channels, C_G) * within(positions, S)


@triton.jit(do_not_specialize=["batch", "splits"])
def _group_norm_kernel(
    x_ptr, weight_ptr, bias_ptr, y_ptr, batch, G, C_G, S, length, splits, eps,
    FLAT: tl.constexpr, PADDED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    channels, offsets, mask, inside = _tile(C_G, S, FLAT, BLOCK_M, BLOCK_N)
    # A work item is one group in every splits-th sample: its weight and bias are loaded only once.
    program = tl.program_id(0).to(tl.int64)
    for item in tl.range(program, G * splits, tl.num_programs(0)):
        first = (item // splits) * C_G
        if weight_ptr is not None:
            weight = load(weight_ptr + first, channels, channels < C_G)
        if bias_ptr is not None:
            bias = load(bias_ptr + first, channels, channels < C_G)
        for sample in tl.range(item % splits, batch, splits):
            start = (sample * G * C_G + first) * S
            y, _ = _standardised(load(x_ptr + start, offsets, mask), inside, length, eps, PADDED)
            if weight_ptr is not None:
                y = y * weight
            if bias_ptr is not None:
                y = y + bias
            tl.store(y_ptr + start + offsets, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["batch", "splits"])
def _group_norm_backward_kernel(
    dy_ptr, x_ptr, weight_ptr, dx_ptr, dweight_ptr, dbias_ptr,
    batch, G, C_G, S, length, splits, eps,
    FLAT: tl.constexpr, PADDED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    channels, offsets, mask, inside = _tile(C_G, S, FLAT, BLOCK_M, BLOCK_N)
    program = tl.program_id(0).to(tl.int64)
    for item in tl.range(program, G * splits, tl.num_programs(0)):
        split = item % splits
        first = (item // splits) * C_G
        if weight_ptr is not None:
            weight = load(weight_ptr + first, channels, channels < C_G)
        if dweight_ptr is not None:
            dweight = tl.zeros(channels.shape, tl.float32)
        if dbias_ptr is not None:
            dbias = tl.zeros(channels.shape, tl.float32)
        for sample in tl.range(split, batch, splits):
            start = (sample * G * C_G + first) * S
            dy = load(dy_ptr + start, offsets, mask)
            if dbias_ptr is not None:
                dbias += _channel_sums(dy, FLAT)
            if dx_ptr is not None or dweight_ptr is not None:
                x = load(x_ptr + start, offsets, mask)
                xhat, rstd = _standardised(x, inside, length, eps, PADDED)
                # weight is one number a channel: mean(g * xhat) follows from the channels' sums.
                sums = _channel_sums(dy * xhat, FLAT)
                if dweight_ptr is not None:
                    dweight += sums
                if dx_ptr is not None:
                    g = dy
                    if weight_ptr is not None:
                        g = dy * weight
                        sums = sums * weight
                    mean_g = _group_sum(g) / length
                    projection = _group_sum(sums) / length
                    dx = (g - mean_g - xhat * projection) * rstd
                    tl.store(dx_ptr + start + offsets, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        sums_at = split * G * C_G + first + channels
        if dweight_ptr is not None:
            tl.store(dweight_ptr + sums_at, dweight, mask=channels < C_G)
        if dbias_ptr is not None:
            tl.store(dbias_ptr + sums_at, dbias, mask=channels < C_G)


@library.kernel("group_norm", "npu")
def group_norm(call, y, plan):
    x, weight, bias = map(contiguous, (call.x, call.weight, call.bias))
    shape = tiling.GroupShape.of(x, call.num_groups)
    if plan is None and shape.is_row:
        x = x.view(shape.batch, shape.C_G)
        layer_norm.launch_layer_norm(call._replace(x=x), y, None)
        return
    if plan is None:
        plan = tiling.group_plan("group_norm", shape, x)
    if plan.KEPT:
        launch_kept(x, weight, bias, y, shape, call.eps, plan)
        return
    if not shape.fits(plan):
        statistics = group_pieces.forward_statistics(x, shape, call.eps, plan)
        group_pieces.apply(None, x, weight, bias, statistics, y, shape, plan)
        return
    splits = plan.splits(shape.batch, shape.G)
    launch(
        _group_norm_kernel, plan, shape.G * splits,
        x, weight, bias, y,
        shape.batch, shape.G, shape.C_G, shape.S, shape.length, splits, call.eps,
        **shape.layout(plan),
    )  # fmt: skip


@library.kernel("group_norm_backward", "npu")
def group_norm_backward(call, dx, dweight, dbias, plan):
    dy, x, weight = map(contiguous, (call.dy, call.x, call.weight))
    shape = tiling.GroupShape.of(x, call.num_groups)
    if plan is None and shape.is_row:
        dy, x = (tensor.view(shape.batch, shape.C_G) for tensor in (dy, x))
        call, arguments = call._replace(dy=dy, x=x), (None, x, dx, dweight, dbias)
        norm = backward_of(NormBackward, tiling.rows, call, *arguments, has_mean=True)
        layer_norm.launch_layer_norm_backward(norm, None)
        return
    if plan is None:
        plan = tiling.group_plan("group_norm_backward", shape, x, dy)
    if plan.KEPT:
        launch_kept_backward(dy, x, weight, dx, dweight, dbias, shape, call.eps, plan)
        return
    if not shape.fits(plan):
        statistics = group_pieces.backward_statistics(
            dy, x, weight, dweight, dbias, shape, call.eps, plan
        )
        if dx is not None:
            group_pieces.apply(dy, x, weight, None, statistics, dx, shape, plan)
        return
    splits = plan.splits(shape.batch, shape.G)
    dweights = partial_sums(dweight, splits)
    dbiases = partial_sums(dbias, splits)
    launch(
        _group_norm_backward_kernel, plan, shape.G * splits,
        dy, x, weight, dx, dweights, dbiases,
        shape.batch, shape.G, shape.C_G, shape.S, shape.length, splits, call.eps,
        **shape.layout(plan),
    )  # fmt: skip
    summed(dweights, dweight)
    summed(dbiases, dbias)
