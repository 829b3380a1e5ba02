"""mhc_pre and mhc_post_res. A program takes some of the M tokens, and goes over their C channels in
tiles with all streams."""

from __future__ import annotations

from dataclasses import replace

import triton
import triton.language as tl
from torch import Tensor

from ...common.hyper_connections.mhc_streams import (
    post_res,
    post_res_backward,
    pre,
    pre_backward,
    register,
    store_sums,
)
from ...common.tensors import next_power_of_2
from .. import tiling
from ..tile import remaining
from ..tiling import COSTS, Cost, Plan, launch

# 4 x 1024: 29.3%.
COSTS["mhc_pre"] = Cost({}, {2: 40.0, 4: 40.0})
# 4 x 1024: 41.9%.
COSTS["mhc_pre_backward"] = Cost({}, {2: 40.0, 4: 40.0})
# 4 x 1024: 43.9%.
COSTS["mhc_post_res"] = Cost({}, {2: 40.0, 4: 40.0})
# 4 x 512: 47.0%. 64 x 32: 73.7%, with a matrix of 64 x 64 beside the tiles.
COSTS["mhc_post_res_backward"] = Cost({}, {2: 60.0, 4: 60.0})


@triton.jit(do_not_specialize=["M"])
def _mhc_pre_kernel(
    x_ptr, h_ptr, y_ptr, M, C,
    HC: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    streams, cols = tl.arange(0, BLOCK_M)[:, None], tl.arange(0, BLOCK_N)[None, :]
    for token in tl.range(tl.program_id(0).to(tl.int64), M, tl.num_programs(0)):
        for col in tl.range(0, C, BLOCK_N):
            inside = cols < remaining(C, col, BLOCK_N)
            pre(
                x_ptr + token * HC * C + col, h_ptr + token * HC, y_ptr + token * C + col,
                streams, cols, inside, C, HC,
            )  # fmt: skip


@triton.jit(do_not_specialize=["M"])
def _mhc_pre_backward_kernel(
    dy_ptr, x_ptr, h_ptr, dx_ptr, dh_ptr, M, C,
    HC: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    streams, cols = tl.arange(0, BLOCK_M)[:, None], tl.arange(0, BLOCK_N)[None, :]
    for token in tl.range(tl.program_id(0).to(tl.int64), M, tl.num_programs(0)):
        dh = tl.zeros((BLOCK_M, 1), tl.float32)
        for col in tl.range(0, C, BLOCK_N):
            inside = cols < remaining(C, col, BLOCK_N)
            dx = None
            if dx_ptr is not None:
                dx = dx_ptr + token * HC * C + col
            dh = pre_backward(
                dy_ptr + token * C + col, x_ptr + token * HC * C + col, h_ptr + token * HC, dx,
                dh, streams, cols, inside, C, HC, dh_ptr is not None,
            )  # fmt: skip
        if dh_ptr is not None:
            dh = dh.to(dh_ptr.dtype.element_ty)
            tl.store(dh_ptr + token * HC + streams, dh, mask=streams < HC)


@triton.jit(do_not_specialize=["M"])
def _mhc_post_res_kernel(
    x_ptr, f_ptr, h_post_ptr, h_res_ptr, y_ptr, M, C,
    HC: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    streams, cols = tl.arange(0, BLOCK_M)[:, None], tl.arange(0, BLOCK_N)[None, :]
    for token in tl.range(tl.program_id(0).to(tl.int64), M, tl.num_programs(0)):
        for col in tl.range(0, C, BLOCK_N):
            inside = cols < remaining(C, col, BLOCK_N)
            start = token * HC * C + col
            post_res(
                x_ptr + start, f_ptr + token * C + col, h_post_ptr + token * HC,
                h_res_ptr + token * (HC * HC), y_ptr + start, streams, cols, inside, C, HC,
            )  # fmt: skip


@triton.jit(do_not_specialize=["M"])
def _mhc_post_res_backward_kernel(
    dy_ptr, x_ptr, f_ptr, h_post_ptr, h_res_ptr, dx_ptr, df_ptr, dh_post_ptr, dh_res_ptr, M, C,
    HC: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    WEIGHTS: tl.constexpr = (dh_post_ptr is not None) or (dh_res_ptr is not None)
    streams, cols = tl.arange(0, BLOCK_M)[:, None], tl.arange(0, BLOCK_N)[None, :]
    for token in tl.range(tl.program_id(0).to(tl.int64), M, tl.num_programs(0)):
        dh_post = tl.zeros((BLOCK_M, 1), tl.float32)
        dh_res = tl.zeros((BLOCK_M, BLOCK_M), tl.float32)
        for col in tl.range(0, C, BLOCK_N):
            inside = cols < remaining(C, col, BLOCK_N)
            start = token * HC * C + col
            dx, df = None, None
            if dx_ptr is not None:
                dx = dx_ptr + start
            if df_ptr is not None:
                df = df_ptr + token * C + col
            dh_post, dh_res = post_res_backward(
                dy_ptr + start, x_ptr + start, f_ptr + token * C + col, h_post_ptr + token * HC,
                h_res_ptr + token * (HC * HC), dx, df, dh_post, dh_res,
                streams, cols, inside, C, HC, BLOCK_M, WEIGHTS,
            )  # fmt: skip
        dh_post_at, dh_res_at = None, None
        if dh_post_ptr is not None:
            dh_post_at = dh_post_ptr + token * HC
        if dh_res_ptr is not None:
            dh_res_at = dh_res_ptr + token * (HC * HC)
        store_sums(dh_post, dh_res, dh_post_at, dh_res_at, HC, BLOCK_M)


KERNELS = {
    "mhc_pre": _mhc_pre_kernel,
    "mhc_pre_backward": _mhc_pre_backward_kernel,
    "mhc_post_res": _mhc_post_res_kernel,
    "mhc_post_res_backward": _mhc_post_res_backward_kernel,
}


def launch_op(op: str, x: Tensor, plan: Plan | None, *tensors: Tensor | None) -> None:
    """Launch the kernel of an op for x, (M, hc, C)."""
    M, hc, C = x.shape
    H = next_power_of_2(hc)
    if plan is None:
        elements = tiling.tile_elements(COSTS[op].wide[4], tiling.ub_bytes())
        width = tiling.chunk_width(C, max(tiling.MIN_BLOCK_N, elements // H))
        plan = Plan(H, width, tiling.vector_cores())
    launch(KERNELS[op], replace(plan, BLOCK_M=H), M, *tensors, M, C, HC=hc)


register("npu", launch_op)
