"""attn_res. M tokens, N columns; the tiles are in lowering/common/attention/attn_res.py."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .... import library
from ...common.attention.attn_res import (
    blocks_of,
    column_gradients,
    combined,
    factors,
    finish,
    mixed_columns,
    mixed_rows,
    per_row,
    scored_rows,
)
from ...common.tensors import cdiv, next_power_of_2
from ..launch import Tile, launch, processors
from ..sums import partial_sums, summed

# The widest row that a program holds in registers, with as many elements of the result.
WIDEST = 8192


# 8 blocks of 8192 x 4096 in bfloat16 take 0.205 ms on an H200, and 0.714 in the backward. Other
# tiles were not timed.
def plan_forward(N: int) -> Tile:
    """Plan whole rows up to WIDEST columns: `attn_res` tells by BLOCK_N >= N."""
    return plan_tiles(N, WIDEST if N <= WIDEST else 2048)


def plan_tiles(N: int, widest: int = 2048) -> Tile:
    """Plan tiles of about 2048 elements, 16 of them a thread."""
    BLOCK_N = min(widest, max(16, next_power_of_2(N)))
    BLOCK_M = max(1, 2048 // BLOCK_N)
    return Tile(BLOCK_N, max(128, BLOCK_M * BLOCK_N // 16), BLOCK_M)


@triton.jit(do_not_specialize=["blocks", "M"])
def _attn_res_kernel(
    x_ptr, w_ptr, y_ptr, blocks, M, N, eps, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_M
    mixed_rows(x_ptr, w_ptr, y_ptr, blocks, M, N, eps, row, BLOCK_M, BLOCK_N)


@triton.jit(do_not_specialize=["M"])
def _attn_res_scores_kernel(
    x_ptr, w_ptr, dy_ptr, score_ptr, rstd_ptr, dalpha_ptr, M, N, eps,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    tiles = tl.cdiv(M, BLOCK_M)
    scored_rows(
        x_ptr, w_ptr, dy_ptr, score_ptr, rstd_ptr, dalpha_ptr, M, N, eps,
        program // tiles, program % tiles * BLOCK_M, BLOCK_M, BLOCK_N,
    )  # fmt: skip


@triton.jit(do_not_specialize=["blocks", "M"])
def _attn_res_mix_kernel(
    x_ptr, alpha_ptr, y_ptr, blocks, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_M
    col = tl.program_id(1).to(tl.int64) * BLOCK_N
    mixed_columns(x_ptr, alpha_ptr, y_ptr, blocks, M, N, row, col, BLOCK_M, BLOCK_N)


@triton.jit(do_not_specialize=["blocks", "M", "splits"])
def _attn_res_backward_kernel(
    dy_ptr, x_ptr, w_ptr, of_dy_ptr, of_w_ptr, of_x_ptr, dx_ptr, dw_ptr, blocks, M, N, splits,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    split = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1).to(tl.int64) * BLOCK_N
    column_gradients(
        dy_ptr, x_ptr, w_ptr, of_dy_ptr, of_w_ptr, of_x_ptr, dx_ptr, dw_ptr,
        blocks, M, N, split, splits, col, BLOCK_M, BLOCK_N,
    )  # fmt: skip


def _launch_scores(
    plan: Tile, x: Tensor, w: Tensor, dy: Tensor | None, numbers: Tensor, eps: float
) -> None:
    score, rstd, dalpha = numbers if dy is not None else (numbers[0], None, None)
    blocks, M, N = x.shape
    launch(
        _attn_res_scores_kernel, (blocks * cdiv(M, plan.BLOCK_M),), x,
        x, w, dy, score, rstd, dalpha, M, N, eps,
        BLOCK_M=plan.BLOCK_M, BLOCK_N=plan.BLOCK_N, num_warps=plan.num_warps,
    )  # fmt: skip


@library.kernel("attn_res", "cuda")
def attn_res(call: Any, y: Tensor, plan: Tile | None) -> None:
    x, w = blocks_of(call.x), combined(call)
    blocks, M, N = x.shape
    plan = plan or plan_forward(N)
    tile = {"BLOCK_M": plan.BLOCK_M, "BLOCK_N": plan.BLOCK_N, "num_warps": plan.num_warps}
    tiles = cdiv(M, plan.BLOCK_M)
    if plan.BLOCK_N >= N:
        launch(_attn_res_kernel, (tiles,), x, x, w, y, blocks, M, N, call.eps, **tile)
        return
    score = per_row(x, 1)
    _launch_scores(plan, x, w, None, score, call.eps)
    alpha = torch.softmax(score[0], 0)
    grid = (tiles, cdiv(N, plan.BLOCK_N))
    launch(_attn_res_mix_kernel, grid, x, x, alpha, y, blocks, M, N, **tile)


@library.kernel("attn_res_backward", "cuda")
def attn_res_backward(
    call: Any, dx: Tensor | None, dquery: Tensor | None, dweight: Tensor | None, plan: Tile | None
) -> None:
    x, w = blocks_of(call.x), combined(call)
    blocks, M, N = x.shape
    dy = call.dy.reshape(M, N).contiguous()
    plan = plan or plan_tiles(N)
    numbers = per_row(x, 3)
    _launch_scores(plan, x, w, dy, numbers, call.eps)
    chunks = cdiv(N, plan.BLOCK_N)
    # `splits` programs share the rows of a chunk of columns: 8 programs a multiprocessor in all.
    splits = max(1, min(cdiv(M, plan.BLOCK_M), 8 * processors(x) // chunks))
    dw = None if dquery is None and dweight is None else torch.empty_like(w)
    partial = partial_sums(dw, splits)
    launch(
        _attn_res_backward_kernel, (splits, chunks), x,
        dy, x, w, *factors(*numbers, N), dx, partial, blocks, M, N, splits,
        BLOCK_M=plan.BLOCK_M, BLOCK_N=plan.BLOCK_N, num_warps=plan.num_warps,
    )  # fmt: skip
    summed((partial, dw))
    finish(call, dw, dquery, dweight)
