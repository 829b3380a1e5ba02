"""mhc_coeffs: the kernels around aclnn's products. M tokens, whose rows have K elements.

Tensors with a few numbers a token are stored in blocks of tokens, with the tokens as the last axis:
a vector instruction then works on one number of many tokens, and not on a short row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...common.hyper_connections.mhc_coeffs import CoefficientsProblem
from ...common.hyper_connections.mhc_coeffs_math import block_coefficients, block_gradients
from ...common.tensors import cdiv
from .. import tiling
from ..activations import activations
from ..activations.activations import place, store, tiles
from ..partial_sums import summed
from ..tile import load, remaining
from ..tiling import COSTS, Cost, Plan, launch

# (1, 8192): 75.1%.
COSTS["mhc_row_rstd"] = Cost({}, {2: 20.0, 4: 20.0})
# Per element of the matrices of a block of tokens, (H, H, tokens). 8 x 8 x 32: 64.0%.
COSTS["mhc_coeffs"] = Cost({}, {2: 70.0, 4: 70.0})
# 4 x 4 x 32, and 8 x 8 x 8: 49.2%. 4 x 4 x 64: 94.7%.
COSTS["mhc_coeffs_backward"] = Cost({}, {2: 190.0, 4: 190.0})
# (1, 4096): 41.7%.
COSTS["mhc_dx"] = Cost({}, {2: 40.0, 4: 40.0})

# The most tokens in a block.
MOST_TOKENS = 64


@triton.jit(do_not_specialize=["M"])
def _row_rstd_kernel(
    x_ptr, rstd_ptr, M, K, eps, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    cols = tl.arange(0, BLOCK_N)[None, :]
    one = tl.arange(0, 1)[:, None]
    for row in tl.range(tl.program_id(0).to(tl.int64), M, tl.num_programs(0)):
        squares = tl.zeros((1, BLOCK_N), tl.float32)
        for col in tl.range(0, K, BLOCK_N):
            x = load(x_ptr + row * K + col, cols, cols < remaining(K, col, BLOCK_N))
            squares += x * x
        rstd = tl.rsqrt(tl.sum(squares, axis=1)[:, None] / K + eps)
        tl.store(rstd_ptr + row + one, rstd)


@triton.jit(do_not_specialize=["M"])
def _coefficients_kernel(
    product_ptr, rstd_ptr, b_ptr, alpha_pre_ptr, alpha_post_ptr, alpha_res_ptr, h_ptr,
    M, tmax, pre_eps, sinkhorn_eps, post_mult,
    HC: tl.constexpr, H: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    COUNT: tl.constexpr = HC * HC + 2 * HC
    for block in tl.range(tl.program_id(0).to(tl.int64), tl.cdiv(M, BLOCK_N), tl.num_programs(0)):
        first = block * BLOCK_N
        start = first * COUNT
        block_coefficients(
            product_ptr + start, rstd_ptr + first, b_ptr,
            alpha_pre_ptr, alpha_post_ptr, alpha_res_ptr,
            h_ptr + start, h_ptr + start + HC * BLOCK_N, h_ptr + start + 2 * HC * BLOCK_N,
            remaining(M, first, BLOCK_N), tmax, pre_eps, sinkhorn_eps, post_mult,
            HC, H, BLOCK_N, True,
        )  # fmt: skip


@triton.jit(do_not_specialize=["M"])
def _coefficient_gradients_kernel(
    dh_ptr, product_ptr, rstd_ptr, b_ptr, alpha_pre_ptr, alpha_post_ptr, alpha_res_ptr,
    dproduct_ptr, of_norm_ptr, partial_ptr, M, K, tmax, segment, sinkhorn_eps, post_mult,
    HC: tl.constexpr, H: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    COUNT: tl.constexpr = HC * HC + 2 * HC
    for block in tl.range(tl.program_id(0).to(tl.int64), tl.cdiv(M, BLOCK_N), tl.num_programs(0)):
        first = block * BLOCK_N
        start = first * COUNT
        partial = None
        if partial_ptr is not None:
            partial = partial_ptr + block * (2 * COUNT)
        block_gradients(
            dh_ptr + start, dh_ptr + start + HC * BLOCK_N, dh_ptr + start + 2 * HC * BLOCK_N,
            product_ptr + start, rstd_ptr + first, b_ptr,
            alpha_pre_ptr, alpha_post_ptr, alpha_res_ptr,
            dproduct_ptr + start, of_norm_ptr + first, partial,
            remaining(M, first, BLOCK_N), K, tmax, segment, sinkhorn_eps, post_mult,
            HC, H, BLOCK_N, True,
        )  # fmt: skip


@triton.jit(do_not_specialize=["M"])
def _dx_kernel(
    product_ptr, x_ptr, dx_ptr, of_norm_ptr, M, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    rows = tl.arange(0, BLOCK_M)[:, None]
    program = tl.program_id(0).to(tl.int64)
    for tile in tl.range(program, tiles(M, K, BLOCK_M, BLOCK_N), tl.num_programs(0)):
        row, col = place(tile, K, BLOCK_M, BLOCK_N)
        product = activations.load(product_ptr, row, col, M, K, K, BLOCK_M, BLOCK_N)
        x = activations.load(x_ptr, row, col, M, K, K, BLOCK_M, BLOCK_N)
        of_norm = load(of_norm_ptr + row, rows, rows < remaining(M, row, BLOCK_M))
        store(dx_ptr, row, col, M, K, K, product - x * of_norm, BLOCK_M, BLOCK_N)


def plan(form: CoefficientsProblem, backward: bool) -> Plan:
    """Choose the tokens of a block, BLOCK_N."""
    cost = COSTS["mhc_coeffs_backward" if backward else "mhc_coeffs"].wide[4]
    elements = tiling.tile_elements(cost, tiling.ub_bytes())
    tokens = max(8, min(MOST_TOKENS, elements // form.H**2))
    return Plan(1, tokens, tiling.vector_cores())


def row_rstd(x: Tensor, eps: float, rstd: Tensor, plan: Plan) -> None:
    """Fill rstd with 1 / rms of each row of x."""
    M, K = x.shape
    rows = tiling.plan("mhc_row_rstd", K, x)
    launch(_row_rstd_kernel, rows, M, x, rstd, M, K, eps)


def coefficients(
    form: CoefficientsProblem, product: Tensor, rstd: Tensor, pre_eps: float,
    h_pre: Tensor, h_post: Tensor, h_res: Tensor, plan: Plan,
) -> None:  # fmt: skip
    """Fill h_pre, h_post and h_res from `product`, x @ phi, and the rows' rstd."""
    M, T = product.shape[0], plan.BLOCK_N
    blocks = in_blocks(product, T)
    h = torch.empty_like(blocks)
    launch(
        _coefficients_kernel, plan, cdiv(M, T),
        blocks, rstd, form.b, *form.alphas, h,
        M, form.tmax, pre_eps, form.sinkhorn_eps, form.post_mult,
        HC=form.hc, H=form.H,
    )  # fmt: skip
    parts = out_of_blocks(h, M).split([form.hc, form.hc, form.hc * form.hc], 1)
    for result, part in zip((h_pre, h_post, h_res), parts, strict=True):
        result.copy_(part.reshape(result.shape))


def gradients(
    form: CoefficientsProblem, dh_pre: Tensor | None, dh_post: Tensor | None, dh_res: Tensor | None,
    product: Tensor, rstd: Tensor, dproduct: Tensor, of_norm: Tensor, sums: Tensor | None,
    plan: Plan,
) -> None:  # fmt: skip
    """Fill dproduct, of_norm (the factor of x in dx) and the sums over tokens, if wanted."""
    M, T = product.shape[0], plan.BLOCK_N
    counts = (form.hc, form.hc, form.hc * form.hc)
    dh = torch.cat(
        [
            product.new_zeros((M, count)) if grad is None else grad.float()
            for grad, count in zip((dh_pre, dh_post, dh_res), counts, strict=True)
        ],
        1,
    )
    blocks = in_blocks(product, T)
    dblocks = torch.empty_like(blocks)
    partial = None if sums is None else sums.new_empty((blocks.shape[0], sums.numel()))
    launch(
        _coefficient_gradients_kernel, plan, blocks.shape[0],
        in_blocks(dh, T), blocks, rstd, form.b, *form.alphas, dblocks, of_norm, partial,
        M, form.x.shape[1], form.tmax, form.segment, form.sinkhorn_eps, form.post_mult,
        HC=form.hc, H=form.H,
    )  # fmt: skip
    dproduct.copy_(out_of_blocks(dblocks, M))
    summed(partial, sums)


def in_blocks(tensor: Tensor, T: int) -> Tensor:
    """Return (M, count) as (blocks, count, T), with zeros after the last token."""
    M, count = tensor.shape
    blocks = cdiv(M, T)
    filled = torch.nn.functional.pad(tensor, (0, 0, 0, blocks * T - M))
    return filled.view(blocks, T, count).transpose(1, 2).contiguous()


def out_of_blocks(blocks: Tensor, M: int) -> Tensor:
    """Return (blocks, count, T) as (M, count): the inverse of `in_blocks`."""
    return blocks.transpose(1, 2).reshape(-1, blocks.shape[1])[:M]


def fill_dx(product: Tensor, x: Tensor, of_norm: Tensor, dx: Tensor) -> None:
    """Fill dx with product - x * of_norm, where of_norm is a number for each row."""
    tensors = [product, x, dx]
    M, K = x.shape
    plan = tiling.elementwise_plan("mhc_dx", M, K, *tensors)
    count = cdiv(M, plan.BLOCK_M) * cdiv(K, plan.BLOCK_N)
    launch(_dx_kernel, plan, count, *tensors, of_norm, M, K)
