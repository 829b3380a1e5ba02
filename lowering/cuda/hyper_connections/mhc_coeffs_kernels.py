"""mhc_coeffs: the kernels before and after cuBLAS's products. M tokens, whose rows have K
elements."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ...common.hyper_connections.mhc_coeffs import CoefficientsProblem
from ...common.hyper_connections.mhc_coeffs_math import block_coefficients, block_gradients
from ...common.tensors import cdiv, next_power_of_2
from ..launch import WARP_SIZE, Tile, launch
from ..sums import summed

# Elements of a tile, the matrices of a block of tokens: 32 in each thread, and 16 in the backward,
# which holds about eight such tiles: compiled for sm_90, twice as many spill up to 32 bytes. The op
# takes 0.157 ms for 8192 tokens of 4 x 4096 on an H200, and 0.809 in the backward. Other tiles were
# not timed.
TILE = 1024
MOST_TOKENS = 32


@triton.jit
def _row_rstd_kernel(x_ptr, rstd_ptr, K, eps, BLOCK_N: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * K
    squares = tl.zeros((BLOCK_N,), tl.float32)
    for start in range(0, K, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        x = tl.load(x_ptr + cols, mask=cols < K, other=0.0).to(tl.float32)
        squares += x * x
    tl.store(rstd_ptr + row, tl.rsqrt(tl.sum(squares, 0) / K + eps))


@triton.jit(do_not_specialize=["M"])
def _coefficients_kernel(
    product_ptr, rstd_ptr, b_ptr, alpha_pre_ptr, alpha_post_ptr, alpha_res_ptr,
    h_pre_ptr, h_post_ptr, h_res_ptr, M, tmax, pre_eps, sinkhorn_eps, post_mult,
    HC: tl.constexpr, H: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * BLOCK_M
    block_coefficients(
        product_ptr + first * (HC * HC + 2 * HC), rstd_ptr + first, b_ptr,
        alpha_pre_ptr, alpha_post_ptr, alpha_res_ptr,
        h_pre_ptr + first * HC, h_post_ptr + first * HC, h_res_ptr + first * (HC * HC),
        tl.minimum(M - first, BLOCK_M), tmax, pre_eps, sinkhorn_eps, post_mult,
        HC, H, BLOCK_M, False,
    )  # fmt: skip


@triton.jit(do_not_specialize=["M"])
def _coefficient_gradients_kernel(
    dh_pre_ptr, dh_post_ptr, dh_res_ptr, product_ptr, rstd_ptr, b_ptr,
    alpha_pre_ptr, alpha_post_ptr, alpha_res_ptr, dproduct_ptr, of_norm_ptr, partial_ptr,
    M, K, tmax, segment, sinkhorn_eps, post_mult,
    HC: tl.constexpr, H: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    COUNT: tl.constexpr = HC * HC + 2 * HC
    block = tl.program_id(0).to(tl.int64)
    first = block * BLOCK_M
    if dh_pre_ptr is not None:
        dh_pre_ptr += first * HC
    if dh_post_ptr is not None:
        dh_post_ptr += first * HC
    if dh_res_ptr is not None:
        dh_res_ptr += first * (HC * HC)
    if partial_ptr is not None:
        partial_ptr += block * (2 * COUNT)
    block_gradients(
        dh_pre_ptr, dh_post_ptr, dh_res_ptr, product_ptr + first * COUNT, rstd_ptr + first, b_ptr,
        alpha_pre_ptr, alpha_post_ptr, alpha_res_ptr,
        dproduct_ptr + first * COUNT, of_norm_ptr + first, partial_ptr,
        tl.minimum(M - first, BLOCK_M), K, tmax, segment, sinkhorn_eps, post_mult,
        HC, H, BLOCK_M, False,
    )  # fmt: skip


@triton.jit
def _dx_kernel(product_ptr, x_ptr, of_norm_ptr, dx_ptr, K, BLOCK_N: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = cols < K
    product = tl.load(product_ptr + row * K + cols, mask=mask)
    x = tl.load(x_ptr + row * K + cols, mask=mask).to(tl.float32)
    dx = product - x * tl.load(of_norm_ptr + row)
    tl.store(dx_ptr + row * K + cols, dx.to(dx_ptr.dtype.element_ty), mask=mask)


def plan(problem: CoefficientsProblem, backward: bool) -> Tile:
    """Plan tiles: BLOCK_N are columns of x, and BLOCK_M the tokens of a block."""
    tokens = max(1, min(MOST_TOKENS >> backward, TILE // problem.H**2))
    return Tile(min(4096, next_power_of_2(problem.x.shape[1])), BLOCK_M=tokens)


def row_rstd(x: Tensor, eps: float, rstd: Tensor, plan: Tile) -> None:
    M, K = x.shape
    launch(_row_rstd_kernel, (M,), x, x, rstd, K, eps, BLOCK_N=plan.BLOCK_N, num_warps=4)


def coefficients(
    problem: CoefficientsProblem, product: Tensor, rstd: Tensor, pre_eps: float,
    h_pre: Tensor, h_post: Tensor, h_res: Tensor, plan: Tile,
) -> None:  # fmt: skip
    M = product.shape[0]
    launch(
        _coefficients_kernel, (cdiv(M, plan.BLOCK_M),), product,
        product, rstd, problem.b, *problem.alphas, h_pre, h_post, h_res,
        M, problem.tmax, pre_eps, problem.sinkhorn_eps, problem.post_mult,
        **_tile(problem, plan, 32),
    )  # fmt: skip


def gradients(
    problem: CoefficientsProblem,
    dh_pre: Tensor | None, dh_post: Tensor | None, dh_res: Tensor | None,
    product: Tensor, rstd: Tensor, dproduct: Tensor, of_norm: Tensor, sums: Tensor | None,
    plan: Tile,
) -> None:  # fmt: skip
    M, blocks = product.shape[0], cdiv(product.shape[0], plan.BLOCK_M)
    partial = None if sums is None else sums.new_empty((blocks, sums.numel()))
    launch(
        _coefficient_gradients_kernel, (blocks,), product,
        dh_pre, dh_post, dh_res, product, rstd, problem.b, *problem.alphas,
        dproduct, of_norm, partial,
        M, problem.x.shape[1], problem.tmax, problem.segment,
        problem.sinkhorn_eps, problem.post_mult,
        **_tile(problem, plan, 16),
    )  # fmt: skip
    summed((partial, sums))


def _tile(problem: CoefficientsProblem, plan: Tile, of_thread: int) -> dict[str, int]:
    """Return the constants and options of a kernel, with `of_thread` elements a thread."""
    threads = problem.H**2 * plan.BLOCK_M // of_thread
    warps = max(1, threads // WARP_SIZE)
    return {"HC": problem.hc, "H": problem.H, "BLOCK_M": plan.BLOCK_M, "num_warps": warps}


def fill_dx(product: Tensor, x: Tensor, of_norm: Tensor, dx: Tensor) -> None:
    M, K = x.shape
    BLOCK_N = min(1024, next_power_of_2(K))
    launch(
        _dx_kernel, (M, cdiv(K, BLOCK_N)), x,
        product, x, of_norm, dx, K,
        BLOCK_N=BLOCK_N, num_warps=4,
    )  # fmt: skip
