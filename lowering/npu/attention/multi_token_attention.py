"""multi_token_attention: the probabilities p of scores, and the gradient of scores.

There are M rows of L scores, one for each query; query i sees the keys 0 to i. A tile has one row,
so that its mask is a number of columns.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ...common.attention.multi_token_attention import probability, register, score_gradient
from ...common.softmax.sparsemax_math import above, below_maximum, is_above, newton_step, supported
from ...common.triton_math import LOWEST
from .. import tiling
from ..softmax.sparsemax import most_steps, whole_sparsemax
from ..tile import load, load_logits, online_updated, remaining
from ..tiling import COSTS, Cost, Plan, launch

# whole (1, 2048): 14.8% | 10.6%. wide (1, 2048): 23.3% | 19.2%.
COSTS["causal"] = Cost({2: 14.3, 4: 14.3}, {2: 22.5, 4: 22.5})
# whole (1, 2048): 29.4% | 25.2%. wide (1, 2048): 50.5% | 46.3%.
COSTS["causal_backward"] = Cost({2: 28.4, 4: 28.4}, {2: 48.6, 4: 48.6})
# whole (1, 2048): 38.0% | 33.8%. wide (1, 2048): 54.8% | 50.6%.
COSTS["causal_sparse"] = Cost({2: 36.6, 4: 36.6}, {2: 52.7, 4: 52.7})
# whole (1, 2048): 63.2% | 63.2%. wide (1, 2048): 96.7% | 96.7%.
COSTS["causal_sparse_backward"] = Cost({2: 60.8, 4: 60.8}, {2: 93.0, 4: 93.0})


@triton.jit
def _keys(row, L):
    """Return the number of keys that the query of a row sees."""
    return (row % L + 1).to(tl.int32)


@triton.jit
def _whole_probabilities(x, steps, SPARSE: tl.constexpr):
    """Return the sparsemax of a whole row if SPARSE, else its softmax."""
    if SPARSE:
        return whole_sparsemax(x, steps, 1)
    else:
        exp = tl.exp(x - tl.max(x, axis=1)[:, None])
        return exp / tl.sum(exp, axis=1)[:, None]


@triton.jit(do_not_specialize=["M", "L"])
def _causal_kernel(
    x_ptr, p_ptr, M, L, steps,
    SPARSE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    cols = tl.arange(0, BLOCK_N)[None, :]
    for row in tl.range(tl.program_id(0).to(tl.int64), M, tl.num_programs(0)):
        start = row * L
        x = load_logits(x_ptr + start, cols, cols < _keys(row, L))
        p = _whole_probabilities(x, steps, SPARSE)
        tl.store(p_ptr + start + cols, p.to(p_ptr.dtype.element_ty), mask=cols < L)


@triton.jit(do_not_specialize=["M", "L"])
def _causal_backward_kernel(
    dp_ptr, x_ptr, dx_ptr, M, L, steps,
    SPARSE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # dx may be dp: a row is written after it has been read.
    cols = tl.arange(0, BLOCK_N)[None, :]
    for row in tl.range(tl.program_id(0).to(tl.int64), M, tl.num_programs(0)):
        start = row * L
        inside = cols < _keys(row, L)
        x = load_logits(x_ptr + start, cols, inside)
        dp = load(dp_ptr + start, cols, inside)
        p = _whole_probabilities(x, steps, SPARSE)
        if SPARSE:
            sum = tl.sum(supported(dp, p), axis=1)[:, None]
            mean = sum / tl.sum(is_above(p, 0.0), axis=1)[:, None]
        else:
            mean = tl.sum(p * dp, axis=1)[:, None]
        dx = score_gradient(dp, p, mean, SPARSE)
        tl.store(dx_ptr + start + cols, dx.to(dx_ptr.dtype.element_ty), mask=cols < L)


@triton.jit
def _wide_totals(
    x_ptr, keys, steps, SPARSE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Return the maximum and the total of a row that fits no tile.

    The total is the sum of exponentials relative to the maximum or, if SPARSE, sparsemax's tau.
    Every step of Newton's iteration finds the row in the L2 cache.
    """
    cols = tl.arange(0, BLOCK_N)[None, :]
    if SPARSE:
        maximum = tl.full((BLOCK_M, 1), -float("inf"), tl.float32)
        for col in tl.range(0, keys, BLOCK_N):
            x = load_logits(x_ptr + col, cols, cols < remaining(keys, col, BLOCK_N))
            maximum = tl.maximum(maximum, tl.max(x, axis=1)[:, None])
        total = tl.full((BLOCK_M, 1), -1.0, tl.float32)
        count = tl.full((BLOCK_M, 1), float("inf"), tl.float32)
        active = tl.full((BLOCK_M, 1), 1.0, tl.float32)
        # The columns that a step reads: none once the iteration has converged, as Triton's loops
        # have no break.
        end = keys
        for _ in tl.range(0, steps):
            sum = tl.zeros((BLOCK_M, 1), tl.float32)
            higher = tl.zeros((BLOCK_M, 1), tl.float32)
            for col in tl.range(0, end, BLOCK_N):
                x = load_logits(x_ptr + col, cols, cols < remaining(keys, col, BLOCK_N))
                below = below_maximum(x, maximum)
                sum += tl.sum(above(below, total), axis=1)[:, None]
                higher += tl.sum(is_above(below, total), axis=1)[:, None]
            total, count, active = newton_step(total, count, active, sum, higher)
            going = tl.max(tl.max(active, axis=1), axis=0)
            end = tl.where(going > 0, keys, 0)
    else:
        maximum = tl.full((BLOCK_M, 1), LOWEST, tl.float32)
        total = tl.zeros((BLOCK_M, 1), tl.float32)
        for col in tl.range(0, keys, BLOCK_N):
            x = load_logits(x_ptr + col, cols, cols < remaining(keys, col, BLOCK_N))
            maximum, total = online_updated(x, maximum, total)
    return maximum, total


@triton.jit(do_not_specialize=["M"])
def _causal_wide_kernel(
    x_ptr, p_ptr, M, L, steps,
    SPARSE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    cols = tl.arange(0, BLOCK_N)[None, :]
    for row in tl.range(tl.program_id(0).to(tl.int64), M, tl.num_programs(0)):
        keys = _keys(row, L)
        x_row = x_ptr + row * L
        maximum, total = _wide_totals(x_row, keys, steps, SPARSE, BLOCK_M, BLOCK_N)
        for col in tl.range(0, L, BLOCK_N):
            x = load_logits(x_row + col, cols, cols < remaining(keys, col, BLOCK_N))
            p = probability(x, maximum, total, SPARSE)
            mask = cols < remaining(L, col, BLOCK_N)
            tl.store(p_ptr + row * L + col + cols, p.to(p_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["M"])
def _causal_wide_backward_kernel(
    dp_ptr, x_ptr, dx_ptr, M, L, steps,
    SPARSE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # dx may be dp: a tile of it is written after the last time that it is read.
    cols = tl.arange(0, BLOCK_N)[None, :]
    for row in tl.range(tl.program_id(0).to(tl.int64), M, tl.num_programs(0)):
        keys = _keys(row, L)
        x_row = x_ptr + row * L
        dp_row = dp_ptr + row * L
        maximum, total = _wide_totals(x_row, keys, steps, SPARSE, BLOCK_M, BLOCK_N)
        mean = tl.zeros((BLOCK_M, 1), tl.float32)
        count = tl.zeros((BLOCK_M, 1), tl.float32)
        for col in tl.range(0, keys, BLOCK_N):
            inside = cols < remaining(keys, col, BLOCK_N)
            x = load_logits(x_row + col, cols, inside)
            dp = load(dp_row + col, cols, inside)
            p = probability(x, maximum, total, SPARSE)
            if SPARSE:
                mean += tl.sum(supported(dp, p), axis=1)[:, None]
                count += tl.sum(is_above(p, 0.0), axis=1)[:, None]
            else:
                mean += tl.sum(p * dp, axis=1)[:, None]
        if SPARSE:
            mean = mean / count
        for col in tl.range(0, L, BLOCK_N):
            inside = cols < remaining(keys, col, BLOCK_N)
            x = load_logits(x_row + col, cols, inside)
            dp = load(dp_row + col, cols, inside)
            p = probability(x, maximum, total, SPARSE)
            dx = score_gradient(dp, p, mean, SPARSE)
            mask = cols < remaining(L, col, BLOCK_N)
            tl.store(dx_ptr + row * L + col + cols, dx.to(dx_ptr.dtype.element_ty), mask=mask)


def launch_forward(scores: Tensor, p: Tensor, sparse: bool, plan: Plan | None = None) -> None:
    """Write the probabilities of scores into p."""
    x = tiling.rows(scores)
    plan = plan or tiling.plan("causal_sparse" if sparse else "causal", x.shape[1], x, p)
    _launch((_causal_kernel, _causal_wide_kernel), plan, x, p, sparse=sparse)


def launch_backward(
    dp: Tensor, scores: Tensor, dscores: Tensor, sparse: bool, plan: Plan | None = None
) -> None:
    """Write the gradient of scores into dscores, which may be dp itself."""
    dp, x = tiling.rows(dp), tiling.rows(scores)
    name = "causal_sparse_backward" if sparse else "causal_backward"
    plan = plan or tiling.plan(name, x.shape[1], dp, x)
    kernels = (_causal_backward_kernel, _causal_wide_backward_kernel)
    _launch(kernels, plan, dp, x, dscores, sparse=sparse)


def _launch(kernels: tuple[Any, Any], plan: Plan, *tensors: Tensor, sparse: bool) -> None:
    """Launch the kernel for rows: kernels[0] if they fit the tile, else kernels[1]."""
    M, L = tensors[0].shape
    kernel = kernels[0] if plan.whole(L) else kernels[1]
    launch(kernel, replace(plan, BLOCK_M=1), M, *tensors, M, L, most_steps(L), SPARSE=sparse)


register("npu", launch_forward, launch_backward)
