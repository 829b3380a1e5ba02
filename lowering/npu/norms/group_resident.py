"""group_norm of groups that stay in the Unified Buffer in their own dtype: a tile of all channels,
which is computed in float32 a few channels at a time."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..partial_sums import partial_sums, summed
from ..tile import load, remaining, tile_offsets, within
from ..tiling import GroupShape, Plan, launch
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
