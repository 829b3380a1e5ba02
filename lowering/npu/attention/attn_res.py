"""attn_res. M tokens, N columns; lowering/common/attention/attn_res.py computes the tiles."""

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
from ...common.tensors import cdiv
from .. import tiling
from ..partial_sums import partial_sums, summed
from ..tiling import COSTS, Cost, Plan, launch

COSTS["attn_res"] = Cost({2: 43.1, 4: 43.1}, {2: 43.1, 4: 43.1})
# (1, 4096): 91.7%, and an overflow on CANN 8.5.0.
COSTS["attn_res_backward"] = Cost({2: 45.9, 4: 45.9}, {2: 45.9, 4: 45.9})


@triton.jit(do_not_specialize=["blocks", "M"])
def _attn_res_kernel(
    x_ptr, w_ptr, y_ptr, blocks, M, N, eps, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    for tile in tl.range(tl.program_id(0).to(tl.int64), tl.cdiv(M, BLOCK_M), tl.num_programs(0)):
        mixed_rows(x_ptr, w_ptr, y_ptr, blocks, M, N, eps, tile * BLOCK_M, BLOCK_M, BLOCK_N)


@triton.jit(do_not_specialize=["blocks", "M"])
def _attn_res_scores_kernel(
    x_ptr, w_ptr, dy_ptr, score_ptr, rstd_ptr, dalpha_ptr, blocks, M, N, eps,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(M, BLOCK_M)
    for item in tl.range(tl.program_id(0).to(tl.int64), blocks * tiles, tl.num_programs(0)):
        scored_rows(
            x_ptr, w_ptr, dy_ptr, score_ptr, rstd_ptr, dalpha_ptr, M, N, eps,
            item // tiles, item % tiles * BLOCK_M, BLOCK_M, BLOCK_N,
        )  # fmt: skip


@triton.jit(do_not_specialize=["blocks", "M"])
def _attn_res_mix_kernel(
    x_ptr, alpha_ptr, y_ptr, blocks, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    across = tl.cdiv(N, BLOCK_N)
    items = tl.cdiv(M, BLOCK_M) * across
    for item in tl.range(tl.program_id(0).to(tl.int64), items, tl.num_programs(0)):
        row, col = item // across * BLOCK_M, item % across * BLOCK_N
        mixed_columns(x_ptr, alpha_ptr, y_ptr, blocks, M, N, row, col, BLOCK_M, BLOCK_N)


@triton.jit(do_not_specialize=["blocks", "M", "splits"])
def _attn_res_backward_kernel(
    dy_ptr, x_ptr, w_ptr, of_dy_ptr, of_w_ptr, of_x_ptr, dx_ptr, dw_ptr, blocks, M, N, splits,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    items = tl.cdiv(N, BLOCK_N) * splits
    for item in tl.range(tl.program_id(0).to(tl.int64), items, tl.num_programs(0)):
        column_gradients(
            dy_ptr, x_ptr, w_ptr, of_dy_ptr, of_w_ptr, of_x_ptr, dx_ptr, dw_ptr,
            blocks, M, N, item % splits, splits, item // splits * BLOCK_N, BLOCK_M, BLOCK_N,
        )  # fmt: skip


def _launch_scores(
    plan: Plan, x: Tensor, w: Tensor, dy: Tensor | None, numbers: Tensor, eps: float
) -> None:
    """Fill `numbers` with each row's score and, if dy is given, its 1 / rms and dalpha."""
    score, rstd, dalpha = numbers if dy is not None else (numbers[0], None, None)
    blocks, M, N = x.shape
    launch(
        _attn_res_scores_kernel, plan, blocks * cdiv(M, plan.BLOCK_M),
        x, w, dy, score, rstd, dalpha, blocks, M, N, eps,
    )  # fmt: skip


@library.kernel("attn_res", "npu")
def attn_res(call: Any, y: Tensor, plan: Plan | None) -> None:
    x, w = blocks_of(call.x), combined(call)
    blocks, M, N = x.shape
    plan = plan or tiling.plan("attn_res", N, x)
    tiles = cdiv(M, plan.BLOCK_M)
    if plan.whole(N):
        launch(_attn_res_kernel, plan, tiles, x, w, y, blocks, M, N, call.eps)
        return
    score = per_row(x, 1)
    _launch_scores(plan, x, w, None, score, call.eps)
    alpha = torch.softmax(score[0], 0)
    items = tiles * cdiv(N, plan.BLOCK_N)
    launch(_attn_res_mix_kernel, plan, items, x, alpha, y, blocks, M, N)


@library.kernel("attn_res_backward", "npu")
def attn_res_backward(
    call: Any, dx: Tensor | None, dquery: Tensor | None, dweight: Tensor | None, plan: Plan | None
) -> None:
    x, w = blocks_of(call.x), combined(call)
    blocks, M, N = x.shape
    dy = call.dy.reshape(M, N).contiguous()
    plan = plan or tiling.plan("attn_res_backward", N, dy, x)
    numbers = per_row(x, 3)
    _launch_scores(plan, x, w, dy, numbers, call.eps)
    chunks = cdiv(N, plan.BLOCK_N)
    splits = plan.splits(cdiv(M, plan.BLOCK_M), chunks)
    dw = None if dquery is None and dweight is None else torch.empty_like(w)
    partial = partial_sums(dw, splits)
    launch(
        _attn_res_backward_kernel, plan, chunks * splits,
        dy, x, w, *factors(*numbers, N), dx, partial, blocks, M, N, splits,
    )  # fmt: skip
    summed(partial, dw)
    finish(call, dw, dquery, dweight)
