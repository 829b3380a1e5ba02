"""dyt. M rows, N columns."""

from __future__ import annotations

import triton
import triton.language as tl

from .... import library
from ...common.norms.dyt_math import dyt_gradients, dyt_result
from ...common.tensors import cdiv, contiguous
from .. import tiling
from ..partial_sums import partial_sums, summed
from ..tile import load, remaining, tile_offsets
from ..tiling import COSTS, Cost, launch

# whole (2, 1024): 58.4% | 58.4%, (1, 4096): 100% | overflow. wide (1, 2048): 66.7%.
COSTS["dyt"] = Cost({2: 45.1, 4: 45.1}, {2: 64.1, 4: 64.1})
# whole (2, 512): 56.3% | 56.3%, (1, 1024): 54.2%. wide (1, 1024): 54.2%, (1, 2048): 100%.
COSTS["dyt_backward"] = Cost({2: 90.9, 4: 90.9}, {2: 104.1, 4: 104.1})


@triton.jit(do_not_specialize=["M", "splits"])
def _dyt_kernel(
    x_ptr, alpha_ptr, gamma_ptr, beta_ptr, y_ptr, M, N, splits,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # A work item is a chunk of columns and a split: every splits-th tile of rows.
    rows, cols, offsets = tile_offsets(N, BLOCK_M, BLOCK_N)
    alpha = tl.load(alpha_ptr).to(tl.float32)
    program = tl.program_id(0).to(tl.int64)
    for item in tl.range(program, tl.cdiv(N, BLOCK_N) * splits, tl.num_programs(0)):
        col = (item // splits) * BLOCK_N
        col_mask = cols < remaining(N, col, BLOCK_N)
        gamma = load(gamma_ptr + col, cols, col_mask)
        beta = None
        if beta_ptr is not None:
            beta = load(beta_ptr + col, cols, col_mask)
        for tile in tl.range(item % splits, tl.cdiv(M, BLOCK_M), splits):
            row = tile * BLOCK_M
            mask = (rows < remaining(M, row, BLOCK_M)) & col_mask
            start = row * N + col
            y = dyt_result(load(x_ptr + start, offsets, mask), alpha, gamma, beta)
            tl.store(y_ptr + start + offsets, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["M", "splits"])
def _dyt_backward_kernel(
    dy_ptr, x_ptr, alpha_ptr, gamma_ptr, dx_ptr, dalpha_ptr, dgamma_ptr, dbeta_ptr, M, N, splits,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # The sums of a work item stay in the Unified Buffer while it goes down the rows.
    rows, cols, offsets = tile_offsets(N, BLOCK_M, BLOCK_N)
    alpha = tl.load(alpha_ptr).to(tl.float32)
    program = tl.program_id(0).to(tl.int64)
    for item in tl.range(program, tl.cdiv(N, BLOCK_N) * splits, tl.num_programs(0)):
        split = item % splits
        col = (item // splits) * BLOCK_N
        col_mask = cols < remaining(N, col, BLOCK_N)
        gamma = load(gamma_ptr + col, cols, col_mask)
        if dalpha_ptr is not None:
            dalpha = tl.zeros((1, BLOCK_N), tl.float32)
        if dgamma_ptr is not None:
            dgamma = tl.zeros((1, BLOCK_N), tl.float32)
        if dbeta_ptr is not None:
            dbeta = tl.zeros((1, BLOCK_N), tl.float32)
        for tile in tl.range(split, tl.cdiv(M, BLOCK_M), splits):
            row = tile * BLOCK_M
            mask = (rows < remaining(M, row, BLOCK_M)) & col_mask
            start = row * N + col
            dy = load(dy_ptr + start, offsets, mask)
            if dbeta_ptr is not None:
                dbeta += tl.sum(dy, axis=0)[None, :]
            if dx_ptr is not None or (dalpha_ptr is not None or dgamma_ptr is not None):
                x = load(x_ptr + start, offsets, mask)
                dx, of_alpha, of_gamma = dyt_gradients(dy, x, alpha, gamma)
                if dalpha_ptr is not None:
                    dalpha += tl.sum(of_alpha, axis=0)[None, :]
                if dgamma_ptr is not None:
                    dgamma += tl.sum(of_gamma, axis=0)[None, :]
                if dx_ptr is not None:
                    tl.store(dx_ptr + start + offsets, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        sums = split * N + col
        if dalpha_ptr is not None:
            # A number for each column, although alpha is one number: the sum of the partial sums
            # also adds the columns.
            tl.store(dalpha_ptr + sums + cols, dalpha, mask=col_mask)
        if dgamma_ptr is not None:
            tl.store(dgamma_ptr + sums + cols, dgamma, mask=col_mask)
        if dbeta_ptr is not None:
            tl.store(dbeta_ptr + sums + cols, dbeta, mask=col_mask)


@library.kernel("dyt", "npu")
def dyt(call, y, plan):
    x, gamma, beta = tiling.rows(call.x), contiguous(call.gamma), contiguous(call.beta)
    M, N = x.shape
    plan = plan or tiling.plan("dyt", N, x)
    chunks = cdiv(N, plan.BLOCK_N)
    splits = plan.splits(cdiv(M, plan.BLOCK_M), chunks)
    arguments = (x, call.alpha, gamma, beta, y, M, N, splits)
    launch(_dyt_kernel, plan, chunks * splits, *arguments)


@library.kernel("dyt_backward", "npu")
def dyt_backward(call, dx, dalpha, dgamma, dbeta, plan):
    dy, x, gamma = tiling.rows(call.dy), tiling.rows(call.x), contiguous(call.gamma)
    M, N = x.shape
    plan = plan or tiling.plan("dyt_backward", N, x, dy)
    chunks = cdiv(N, plan.BLOCK_N)
    splits = plan.splits(cdiv(M, plan.BLOCK_M), chunks)
    dgammas, dbetas = partial_sums(dgamma, splits), partial_sums(dbeta, splits)
    dalphas = partial_sums(dalpha, splits * N)
    launch(
        _dyt_backward_kernel, plan, chunks * splits,
        dy, x, call.alpha, gamma, dx, dalphas, dgammas, dbetas,
        M, N, splits,
    )  # fmt: skip
    for partial, gradient in ((dalphas, dalpha), (dgammas, dgamma), (dbetas, dbeta)):
        summed(partial, gradient)
