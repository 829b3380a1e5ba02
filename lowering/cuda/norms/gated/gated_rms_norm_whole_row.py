"""gated_rms_norm of whole rows: a program reads a group of columns of its rows once."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from ....common.norms.gated_norm_math import (
    gate_factor,
    gated_norm_gradients,
    gated_norm_result,
    gated_norm_terms,
)
from ....common.sizes import cdiv
from ....common.triton_math import to_float32_again
from ...launch import WholeRow, launch
from ...row_sums import two_row_sums


@triton.jit(do_not_specialize=["M"])
def gated_rms_norm_kernel(
    x_ptr, gate_ptr, weight_ptr, y_ptr, M, N, groups, stride_x, stride_gate, eps,
    NORM_FIRST: tl.constexpr, ACTIVATION: tl.constexpr, CASTING_MODE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    program = tl.program_id(0).to(tl.int64)
    rows = (program // groups * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
    cols = tl.arange(0, BLOCK_N)[None, :]
    # The mask is of columns within the group, the offsets are of columns of x.
    mask = (rows < M) & (cols < N)
    cols += program % groups * N
    x = tl.load(x_ptr + rows * stride_x + cols, mask=mask, other=0.0)
    gate = tl.load(gate_ptr + rows * stride_gate + cols, mask=mask, other=0.0)
    s = x.to(tl.float32)
    if not NORM_FIRST:
        s *= gate_factor(gate.to(tl.float32), ACTIVATION)
    rstd = tl.rsqrt(tl.sum(s * s, 1)[:, None] / N + eps)
    # The row stays in registers in its own dtype, and the weight is loaded after the sum.
    weight = None
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + cols, mask=tl.arange(0, BLOCK_N)[None, :] < N, other=0.0)
    s = to_float32_again(x)
    gate = to_float32_again(gate)
    if not NORM_FIRST:
        s *= gate_factor(gate, ACTIVATION)
    y = gated_norm_result(s, rstd, weight, gate, dtype, NORM_FIRST, ACTIVATION, CASTING_MODE)
    tl.store(y_ptr + rows * N * groups + cols, y.to(dtype), mask=mask)


@triton.jit(do_not_specialize=["M"])
def gated_rms_norm_backward_kernel(
    dy_ptr, x_ptr, gate_ptr, weight_ptr, dx_ptr, dgate_ptr, dweight_ptr,
    M, N, groups, stride_dy, stride_x, stride_gate, eps,
    NORM_FIRST: tl.constexpr, ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    # A program has the group program_id(0). `within` are columns within it, `cols` those of x.
    program = tl.program_id(1).to(tl.int64)
    within = tl.arange(0, BLOCK_N)[None, :]
    cols = tl.program_id(0).to(tl.int64) * N + within
    weight = None
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + cols, mask=within < N, other=0.0).to(tl.float32)
    dweight = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in tl.range(
        program * BLOCK_M, M, tl.num_programs(1) * BLOCK_M, num_stages=NUM_STAGES
    ):
        rows = (start + tl.arange(0, BLOCK_M))[:, None]
        mask = (rows < M) & (within < N)
        x = tl.load(x_ptr + rows * stride_x + cols, mask=mask, other=0.0)
        gate = tl.load(gate_ptr + rows * stride_gate + cols, mask=mask, other=0.0)
        dy = tl.load(dy_ptr + rows * stride_dy + cols, mask=mask, other=0.0)
        s, g = gated_norm_terms(
            dy.to(tl.float32), x.to(tl.float32), gate.to(tl.float32), weight, NORM_FIRST, ACTIVATION
        )
        squares, products = two_row_sums(s * s, g * s)
        mean_square = squares / N
        if BLOCK_M > 1:
            # Rows past M are zeros, which eps = 0 would turn into 0 * inf in dweight.
            mean_square = tl.where(rows < M, mean_square, 1.0)
        rstd = tl.rsqrt(mean_square + eps)
        dx, dgate, product = gated_norm_gradients(
            to_float32_again(dy), to_float32_again(x), to_float32_again(gate), weight,
            rstd, products / N * rstd, NORM_FIRST, ACTIVATION,
        )  # fmt: skip
        out = rows * N * tl.num_programs(0) + cols
        if dweight_ptr is not None:
            dweight += product
        if dx_ptr is not None:
            tl.store(dx_ptr + out, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        if dgate_ptr is not None:
            tl.store(dgate_ptr + out, dgate.to(dgate_ptr.dtype.element_ty), mask=mask)
    if dweight_ptr is not None:
        sums = tl.sum(dweight, 0)[None, :]
        tl.store(dweight_ptr + program * N * tl.num_programs(0) + cols, sums, mask=within < N)


def launch_whole_rows(
    plan: WholeRow, tensors: tuple[Any, ...], sizes: tuple[Any, ...], constants: dict[str, Any]
) -> None:
    M, _, groups, *_ = sizes
    launch(
        gated_rms_norm_kernel, (cdiv(M, plan.BLOCK_M) * groups,), tensors[0],
        *tensors, *sizes,
        **constants, BLOCK_M=plan.BLOCK_M, BLOCK_N=plan.BLOCK_N, num_warps=plan.num_warps,
    )  # fmt: skip


def launch_whole_row_gradients(
    plan: WholeRow, tensors: tuple[Any, ...], sizes: tuple[Any, ...], constants: dict[str, Any]
) -> None:
    launch(
        gated_rms_norm_backward_kernel, (sizes[2], plan.programs), tensors[0],
        *tensors, *sizes,
        **constants, BLOCK_M=plan.BLOCK_M, BLOCK_N=plan.BLOCK_N,
        NUM_STAGES=plan.num_stages, num_warps=plan.num_warps,
    )  # fmt: skip
