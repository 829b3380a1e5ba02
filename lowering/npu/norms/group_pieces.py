"""group_norm of groups too large for a tile, by three kernels: channel moments, group statistics,
and the elementwise rest.

M is the number of channels of all groups and samples, with S positions each. The moments of a
channel are its mean, its squared deviations, and in the backward the sums of dy and of
dy * (x - mean). The gradients of weight and bias are sums of the samples' moments, so that no two
programs share a sum.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...common.tensors import cdiv
from ..partial_sums import summed
from ..tile import lane_counts, lanes_merged, lanes_updated, load, remaining, tile_offsets, within
from ..tiling import GroupShape, Plan, launch

# The most channels in a tile of `_group_statistics_kernel`, which does a thousandth of the work.
STATISTICS_BLOCK = 1024


@triton.jit(do_not_specialize=["M"])
def _channel_moments_kernel(
    x_ptr, dy_ptr, mean_ptr, m2_ptr, sum_dy_ptr, product_ptr, M, S,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # Each lane keeps the sum of dy * (x - mean) about its running mean, and corrects it whenever
    # that mean changes.
    rows, cols, offsets = tile_offsets(S, BLOCK_M, BLOCK_N)
    counts = lane_counts(cols, S, BLOCK_N)
    for tile in tl.range(tl.program_id(0).to(tl.int64), tl.cdiv(M, BLOCK_M), tl.num_programs(0)):
        row = tile * BLOCK_M
        row_mask = rows < remaining(M, row, BLOCK_M)
        lane_mean = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        m2 = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        if dy_ptr is not None:
            sum_dy = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            product = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for chunk in tl.range(0, tl.cdiv(S, BLOCK_N)):
            col = chunk * BLOCK_N
            left = remaining(S, col, BLOCK_N)
            mask = row_mask & (cols < left)
            x = load(x_ptr + row * S + col, offsets, mask)
            before = lane_mean
            lane_mean, m2 = lanes_updated(x, within(cols, left), chunk + 1, lane_mean, m2)
            if dy_ptr is not None:
                dy = load(dy_ptr + row * S + col, offsets, mask)
                product += dy * (x - lane_mean) - sum_dy * (lane_mean - before)
                sum_dy += dy
        mean, deviation, rest, squares = lanes_merged(lane_mean, m2, counts, S)
        tl.store(mean_ptr + row + rows, mean + rest, mask=row_mask)
        tl.store(m2_ptr + row + rows, squares, mask=row_mask)
        if dy_ptr is not None:
            total_dy = tl.sum(sum_dy, axis=1)[:, None]
            dyx = tl.sum(product + sum_dy * deviation, axis=1)[:, None] - total_dy * rest
            tl.store(sum_dy_ptr + row + rows, total_dy, mask=row_mask)
            tl.store(product_ptr + row + rows, dyx, mask=row_mask)


@triton.jit(do_not_specialize=["groups"])
def _group_statistics_kernel(
    means_ptr, m2_ptr, sum_dy_ptr, product_ptr, weight_ptr,
    mean_ptr, rstd_ptr, mean_g_ptr, projection_ptr, dweight_ptr,
    groups, G, C_G, S, length, eps,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # Compute a group's mean, rstd, mean(g) and mean(g * xhat) from the moments of its channels, and
    # each channel's part of the gradient of weight.
    one = tl.arange(0, BLOCK_M)[:, None]
    cols = tl.arange(0, BLOCK_N)[None, :]
    program = tl.program_id(0).to(tl.int64)
    for group in tl.range(program, groups, tl.num_programs(0)):
        base = group * C_G
        # The means are summed relative to the first channel's mean: the rounding error is then
        # one of the deviations, and not of a mean that may be far larger.
        pivot = tl.load(means_ptr + base + one)
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for col in tl.range(0, C_G, BLOCK_N):
            left = remaining(C_G, col, BLOCK_N)
            means = load(means_ptr + base + col, cols, cols < left)
            total += (means - pivot) * within(cols, left)
        mean = pivot + tl.sum(total, axis=1)[:, None] / C_G
        squares = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        sum_g = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        product = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for col in tl.range(0, C_G, BLOCK_N):
            left = remaining(C_G, col, BLOCK_N)
            mask = cols < left
            deviation = (load(means_ptr + base + col, cols, mask) - mean) * within(cols, left)
            # A channel's squares about the group's mean, from those about its own.
            squares += load(m2_ptr + base + col, cols, mask) + S * deviation * deviation
            if sum_dy_ptr is not None:
                g = load(sum_dy_ptr + base + col, cols, mask)
                gx = load(product_ptr + base + col, cols, mask) + g * deviation
                if weight_ptr is not None:
                    weight = load(weight_ptr + (group % G) * C_G + col, cols, mask)
                    g = g * weight
                    gx = gx * weight
                sum_g += g
                product += gx
        rstd = tl.rsqrt(tl.sum(squares, axis=1)[:, None] / length + eps)
        tl.store(mean_ptr + group + one, mean)
        tl.store(rstd_ptr + group + one, rstd)
        if sum_dy_ptr is not None:
            tl.store(mean_g_ptr + group + one, tl.sum(sum_g, axis=1)[:, None] / length)
            projection = tl.sum(product, axis=1)[:, None] / length * rstd
            tl.store(projection_ptr + group + one, projection)
        if dweight_ptr is not None:
            for col in tl.range(0, C_G, BLOCK_N):
                mask = cols < remaining(C_G, col, BLOCK_N)
                deviation = load(means_ptr + base + col, cols, mask) - mean
                part = load(sum_dy_ptr + base + col, cols, mask) * deviation
                part = (part + load(product_ptr + base + col, cols, mask)) * rstd
                tl.store(dweight_ptr + base + col + cols, part, mask=mask)


@triton.jit(do_not_specialize=["groups"])
def _group_apply_kernel(
    x_ptr, dy_ptr, weight_ptr, bias_ptr, mean_ptr, rstd_ptr, mean_g_ptr, projection_ptr, out_ptr,
    groups, G, C_G, S,
    BACKWARD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # Write y, or for BACKWARD dx, from the groups' statistics. A work item is a block of channels
    # of one group.
    rows, cols, offsets = tile_offsets(S, BLOCK_M, BLOCK_N)
    one = tl.arange(0, 1)[:, None]
    blocks = tl.cdiv(C_G, BLOCK_M)
    program = tl.program_id(0).to(tl.int64)
    for item in tl.range(program, groups * blocks, tl.num_programs(0)):
        group = item // blocks
        channel = (item % blocks) * BLOCK_M
        row_mask = rows < remaining(C_G, channel, BLOCK_M)
        mean = tl.load(mean_ptr + group + one)
        rstd = tl.load(rstd_ptr + group + one)
        if BACKWARD:
            mean_g = tl.load(mean_g_ptr + group + one)
            projection = tl.load(projection_ptr + group + one)
        if weight_ptr is not None:
            weight = load(weight_ptr + (group % G) * C_G + channel, rows, row_mask)
        if bias_ptr is not None:
            bias = load(bias_ptr + (group % G) * C_G + channel, rows, row_mask)
        base = (group * C_G + channel) * S
        for col in tl.range(0, S, BLOCK_N):
            mask = row_mask & (cols < remaining(S, col, BLOCK_N))
            xhat = (load(x_ptr + base + col, offsets, mask) - mean) * rstd
            if BACKWARD:
                g = load(dy_ptr + base + col, offsets, mask)
                if weight_ptr is not None:
                    g = g * weight
                out = (g - mean_g - xhat * projection) * rstd
            else:
                out = xhat
                if weight_ptr is not None:
                    out = out * weight
                if bias_ptr is not None:
                    out = out + bias
            tl.store(out_ptr + base + col + offsets, out.to(out_ptr.dtype.element_ty), mask=mask)


def _statistics(
    dy: Tensor | None, x: Tensor, weight: Tensor | None, dweights: Tensor | None,
    shape: GroupShape, eps: float, plan: Plan,
) -> tuple[list[Tensor | None], list[Tensor | None]]:  # fmt: skip
    """Compute the channels' moments and the groups' statistics; the last two of each need dy."""
    channels = shape.groups * shape.C_G
    absent = [None, None] if dy is None else []
    moments = [*x.new_empty((4 - len(absent), channels), dtype=torch.float32), *absent]
    statistics = [*x.new_empty((4 - len(absent), shape.groups), dtype=torch.float32), *absent]
    launch(
        _channel_moments_kernel, plan, cdiv(channels, plan.BLOCK_M),
        x, dy, *moments, channels, shape.S,
    )  # fmt: skip
    launch(
        _group_statistics_kernel,
        Plan(1, min(STATISTICS_BLOCK, plan.BLOCK_M * plan.BLOCK_N), plan.cores), shape.groups,
        *moments, weight, *statistics, dweights,
        shape.groups, shape.G, shape.C_G, shape.S, shape.length, eps,
    )  # fmt: skip
    return moments, statistics


def forward_statistics(x: Tensor, shape: GroupShape, eps: float, plan: Plan) -> list[Tensor | None]:
    """Compute the groups' mean and rstd, followed by two None in the place of the backward's."""
    return _statistics(None, x, None, None, shape, eps, plan)[1]


def backward_statistics(
    dy: Tensor, x: Tensor, weight: Tensor | None, dweight: Tensor | None, dbias: Tensor | None,
    shape: GroupShape, eps: float, plan: Plan,
) -> list[Tensor | None]:  # fmt: skip
    """Write dweight and dbias; return the groups' mean, rstd, mean(g) and mean(g * xhat)."""
    sums = (shape.batch, shape.G * shape.C_G)
    dweights = None if dweight is None else x.new_empty(sums, dtype=torch.float32)
    moments, statistics = _statistics(dy, x, weight, dweights, shape, eps, plan)
    summed(dweights, dweight)
    summed(moments[2].view(sums), dbias)
    return statistics


def apply(
    dy: Tensor | None, x: Tensor, weight: Tensor | None, bias: Tensor | None,
    statistics: list[Tensor | None], out: Tensor, shape: GroupShape, plan: Plan,
) -> None:  # fmt: skip
    """Write y into out, or dx if dy is given, from the groups' statistics."""
    launch(
        _group_apply_kernel, plan, shape.groups * cdiv(shape.C_G, plan.BLOCK_M),
        x, dy, weight, bias, *statistics, out,
        shape.groups, shape.G, shape.C_G, shape.S,
        BACKWARD=dy is not None,
    )  # fmt: skip
