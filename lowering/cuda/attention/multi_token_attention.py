"""multi_token_attention: kernels of p from scores, and of the gradient of scores. Each of M rows is
a query with L scores, of which query i uses those of keys 0 to i."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ...common.attention.causal_math import probability, score_gradient
from ...common.attention.multi_token_attention import register
from ...common.softmax.sparsemax_math import is_above, supported
from ...common.triton_math import LOWEST
from ..launch import TwoPass, WholeRow, launch, launch_whole_rows, plan_whole_rows, rows
from ..row_sums import two_row_sums, two_totals
from ..softmax.sparsemax import row_maximum, row_tile, whole_sparsemax, wide_options, wide_threshold
from .causal_convolution import KernelConvolution


@triton.jit
def _whole_probabilities(x, SPARSE: tl.constexpr, BLOCK_M: tl.constexpr):
    """Compute p of whole rows. Scores that a query does not use are -inf."""
    if SPARSE:
        return whole_sparsemax(x, BLOCK_M)
    else:
        maximum = tl.maximum(tl.max(x, 1), LOWEST)[:, None]
        exp = tl.exp(x - maximum)
        return exp * (1.0 / tl.sum(exp, 1)[:, None])


@triton.jit(do_not_specialize=["M"])
def causal_kernel(
    x_ptr, p_ptr, M, L, stride_x,
    SPARSE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    rows = (tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
    cols = tl.arange(0, BLOCK_N)[None, :]
    # row % L is the query. p is written for all keys, and is 0 for those after the query.
    inside = (rows < M) & (cols <= rows % L)
    x = tl.load(x_ptr + rows * stride_x + cols, mask=inside, other=-float("inf")).to(tl.float32)
    p = _whole_probabilities(x, SPARSE, BLOCK_M)
    mask = (rows < M) & (cols < L)
    tl.store(p_ptr + rows * L + cols, p.to(p_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["M"])
def causal_backward_kernel(
    dp_ptr, x_ptr, dx_ptr, M, L, stride_dp, stride_x,
    SPARSE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # dx may be dp: a program has read its rows before it writes them.
    rows = (tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
    cols = tl.arange(0, BLOCK_N)[None, :]
    inside = (rows < M) & (cols <= rows % L)
    x = tl.load(x_ptr + rows * stride_x + cols, mask=inside, other=-float("inf")).to(tl.float32)
    dp = tl.load(dp_ptr + rows * stride_dp + cols, mask=inside, other=0.0).to(tl.float32)
    p = _whole_probabilities(x, SPARSE, BLOCK_M)
    if SPARSE:
        sum, count = two_row_sums(supported(dp, p), is_above(p, 0.0))
        mean = sum / count
    else:
        mean = tl.sum(p * dp, 1)[:, None]
    dx = score_gradient(dp, p, mean, SPARSE)
    mask = (rows < M) & (cols < L)
    tl.store(dx_ptr + rows * L + cols, dx.to(dx_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _wide_totals(x_ptr, N, SPARSE: tl.constexpr, BLOCK_N: tl.constexpr, FOLD: tl.constexpr):
    """Compute the maximum and the total (see `probability`) of a row of N scores that is wider than
    a tile."""
    maximum = row_maximum(x_ptr, N, BLOCK_N)
    if SPARSE:
        total = wide_threshold(x_ptr, N, maximum, BLOCK_N, FOLD)
    else:
        maximum = tl.maximum(maximum, LOWEST)
        sums = tl.zeros((BLOCK_N,), tl.float32)
        for start in tl.range(0, N, BLOCK_N, num_stages=1):
            x = row_tile(x_ptr, start + tl.arange(0, BLOCK_N), N, -float("inf"))
            sums += tl.exp(x - maximum)
        total = tl.sum(sums, 0)
    return maximum, total


@triton.jit(do_not_specialize=["M"])
def causal_wide_kernel(
    x_ptr, p_ptr, M, L, stride_x,
    SPARSE: tl.constexpr, BLOCK_N: tl.constexpr, FOLD: tl.constexpr,
):  # fmt: skip
    # A program has one row.
    row = tl.program_id(0).to(tl.int64)
    keys = (row % L + 1).to(tl.int32)
    x_ptr += row * stride_x
    maximum, total = _wide_totals(x_ptr, keys, SPARSE, BLOCK_N, FOLD)
    for start in tl.range(0, L, BLOCK_N, num_stages=1):
        cols = start + tl.arange(0, BLOCK_N)
        x = row_tile(x_ptr, cols, keys, -float("inf"))
        p = probability(x, maximum, total, SPARSE)
        tl.store(p_ptr + row * L + cols, p.to(p_ptr.dtype.element_ty), mask=cols < L)


@triton.jit(do_not_specialize=["M"])
def causal_wide_backward_kernel(
    dp_ptr, x_ptr, dx_ptr, M, L, stride_dp, stride_x,
    SPARSE: tl.constexpr, BLOCK_N: tl.constexpr, FOLD: tl.constexpr,
):  # fmt: skip
    # dx may be dp: a tile of it is written after the last time that it is read.
    row = tl.program_id(0).to(tl.int64)
    keys = (row % L + 1).to(tl.int32)
    dp_ptr += row * stride_dp
    x_ptr += row * stride_x
    maximum, total = _wide_totals(x_ptr, keys, SPARSE, BLOCK_N, FOLD)
    sums = tl.zeros((BLOCK_N,), tl.float32)
    counts = tl.zeros((BLOCK_N,), tl.float32)
    for start in tl.range(0, keys, BLOCK_N, num_stages=1):
        cols = start + tl.arange(0, BLOCK_N)
        dp = row_tile(dp_ptr, cols, keys, 0.0)
        p = probability(row_tile(x_ptr, cols, keys, -float("inf")), maximum, total, SPARSE)
        if SPARSE:
            sums += supported(dp, p)
            counts += is_above(p, 0.0)
        else:
            sums += p * dp
    if SPARSE:
        sum, count = two_totals(sums, counts)
        mean = sum / count
    else:
        mean = tl.sum(sums, 0)
    for start in tl.range(0, L, BLOCK_N, num_stages=1):
        cols = start + tl.arange(0, BLOCK_N)
        dp = row_tile(dp_ptr, cols, keys, 0.0)
        p = probability(row_tile(x_ptr, cols, keys, -float("inf")), maximum, total, SPARSE)
        dx = score_gradient(dp, p, mean, SPARSE)
        tl.store(dx_ptr + row * L + cols, dx.to(dx_ptr.dtype.element_ty), mask=cols < L)


def plan_forward(L: int) -> WholeRow | TwoPass:
    """Plan whole rows up to 32768 scores, of which 1024 threads hold 32 float32 each."""
    return plan_whole_rows(L, 1024) if L <= 32768 else TwoPass(8192, 512)


def plan_backward(L: int) -> WholeRow | TwoPass:
    """Plan whole rows up to 16384 scores, of which 1024 threads hold 16 float32 each of p, and as
    many of dp."""
    return plan_whole_rows(L, 1024) if L <= 16384 else TwoPass(8192, 512)


def launch_forward(
    scores: Tensor, p: Tensor, sparse: bool, plan: WholeRow | TwoPass | None = None
) -> None:
    x = rows(scores)
    M, L = x.shape
    plan = plan or plan_forward(L)
    arguments = (x, p, M, L, x.stride(0))
    if isinstance(plan, WholeRow):
        launch_whole_rows(causal_kernel, plan, x, *arguments, SPARSE=sparse)
    else:
        options = wide_options(plan, x)
        launch(causal_wide_kernel, (M,), x, *arguments, SPARSE=sparse, **options)


def launch_backward(
    dp: Tensor, scores: Tensor, dscores: Tensor, sparse: bool,
    plan: WholeRow | TwoPass | None = None,
) -> None:  # fmt: skip
    """Launch the kernel of the gradient of scores; dscores may be dp."""
    dp, x = rows(dp), rows(scores)
    M, L = x.shape
    plan = plan or plan_backward(L)
    arguments = (dp, x, dscores, M, L, dp.stride(0), x.stride(0))
    if isinstance(plan, WholeRow):
        launch_whole_rows(causal_backward_kernel, plan, x, *arguments, SPARSE=sparse)
    else:
        options = wide_options(plan, x)
        launch(causal_wide_backward_kernel, (M,), x, *arguments, SPARSE=sparse, **options)


register("cuda", launch_forward, launch_backward, KernelConvolution)
