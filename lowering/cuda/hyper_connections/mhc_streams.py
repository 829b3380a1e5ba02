"""mhc_pre and mhc_post_res. M tokens, each of hc streams of C channels."""

from __future__ import annotations

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
from ...common.tensors import cdiv, next_power_of_2
from ..launch import Tile, launch

# Elements of a tile: 32 a thread, which sums the streams of its columns by itself. No launch of
# these ops has been timed.
TILE = 4096


@triton.jit
def _tile(col, C, H: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the streams, the columns of the tile from `col` on, and which of these are
    channels."""
    streams = tl.arange(0, H)[:, None].to(tl.int64)
    cols = col + tl.arange(0, BLOCK_N)[None, :].to(tl.int64)
    return streams, cols, cols < C


@triton.jit
def _mhc_pre_kernel(
    x_ptr, h_ptr, y_ptr, C,
    HC: tl.constexpr, H: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    streams, cols, inside = _tile(tl.program_id(1).to(tl.int64) * BLOCK_N, C, H, BLOCK_N)
    pre(x_ptr + token * HC * C, h_ptr + token * HC, y_ptr + token * C, streams, cols, inside, C, HC)


@triton.jit
def _mhc_pre_backward_kernel(
    dy_ptr, x_ptr, h_ptr, dx_ptr, dh_ptr, C,
    HC: tl.constexpr, H: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    dy_ptr += token * C
    x_ptr += token * HC * C
    h_ptr += token * HC
    if dx_ptr is not None:
        dx_ptr += token * HC * C
    dh = tl.zeros((H, 1), tl.float32)
    for col in range(0, C, BLOCK_N):
        streams, cols, inside = _tile(col, C, H, BLOCK_N)
        dh = pre_backward(
            dy_ptr, x_ptr, h_ptr, dx_ptr, dh, streams, cols, inside, C, HC, dh_ptr is not None
        )
    if dh_ptr is not None:
        streams = tl.arange(0, H)[:, None]
        dh = dh.to(dh_ptr.dtype.element_ty)
        tl.store(dh_ptr + token * HC + streams, dh, mask=streams < HC)


@triton.jit
def _mhc_post_res_kernel(
    x_ptr, f_ptr, h_post_ptr, h_res_ptr, y_ptr, C,
    HC: tl.constexpr, H: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    streams, cols, inside = _tile(tl.program_id(1).to(tl.int64) * BLOCK_N, C, H, BLOCK_N)
    post_res(
        x_ptr + token * HC * C, f_ptr + token * C, h_post_ptr + token * HC,
        h_res_ptr + token * (HC * HC), y_ptr + token * HC * C, streams, cols, inside, C, HC,
    )  # fmt: skip


@triton.jit
def _mhc_post_res_backward_kernel(
    dy_ptr, x_ptr, f_ptr, h_post_ptr, h_res_ptr, dx_ptr, df_ptr, dh_post_ptr, dh_res_ptr, C,
    HC: tl.constexpr, H: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    if dx_ptr is not None:
        dx_ptr += token * HC * C
    if df_ptr is not None:
        df_ptr += token * C
    if dh_post_ptr is not None:
        dh_post_ptr += token * HC
    if dh_res_ptr is not None:
        dh_res_ptr += token * (HC * HC)
    WEIGHTS: tl.constexpr = (dh_post_ptr is not None) or (dh_res_ptr is not None)
    dh_post = tl.zeros((H, 1), tl.float32)
    dh_res = tl.zeros((H, H), tl.float32)
    for col in range(0, C, BLOCK_N):
        streams, cols, inside = _tile(col, C, H, BLOCK_N)
        dh_post, dh_res = post_res_backward(
            dy_ptr + token * HC * C, x_ptr + token * HC * C, f_ptr + token * C,
            h_post_ptr + token * HC, h_res_ptr + token * (HC * HC), dx_ptr, df_ptr,
            dh_post, dh_res, streams, cols, inside, C, HC, H, WEIGHTS,
        )  # fmt: skip
    store_sums(dh_post, dh_res, dh_post_ptr, dh_res_ptr, HC, H)


KERNELS = {
    "mhc_pre": _mhc_pre_kernel,
    "mhc_pre_backward": _mhc_pre_backward_kernel,
    "mhc_post_res": _mhc_post_res_kernel,
    "mhc_post_res_backward": _mhc_post_res_backward_kernel,
}


def launch_op(op: str, x: Tensor, plan: Tile | None, *tensors: Tensor | None) -> None:
    M, hc, C = x.shape
    H = next_power_of_2(hc)
    BLOCK_N = plan.BLOCK_N if plan else max(16, min(TILE // H, next_power_of_2(C)))
    # A program of a backward sums over the channels.
    grid = (M,) if op.endswith("_backward") else (M, cdiv(C, BLOCK_N))
    launch(
        KERNELS[op], grid, x,
        *tensors, C,
        HC=hc, H=H, BLOCK_N=BLOCK_N, num_warps=max(1, min(4, H * BLOCK_N // 1024)),
    )  # fmt: skip


register("cuda", launch_op)
