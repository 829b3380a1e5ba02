"""The forward of gated_rms_norm, where a program reads a group of its row twice."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from ....common.norms.gated_norm_math import gate_factor, gated_norm_result
from ....common.sizes import cdiv
from ....common.triton_math import folded
from ...launch import TwoPass, launch


@triton.jit(do_not_specialize=["M"])
def gated_rms_norm_two_pass_kernel(
    x_ptr, gate_ptr, weight_ptr, y_ptr, M, N, groups, stride_x, stride_gate, eps,
    NORM_FIRST: tl.constexpr, ACTIVATION: tl.constexpr, CASTING_MODE: tl.constexpr,
    BLOCK_N: tl.constexpr, TILES: tl.constexpr, FOLD: tl.constexpr,
):  # fmt: skip
    # A program has one group of one row; `first` is the group's first column. The first pass asks
    # the caches to keep the row, and the second goes backwards, so that it reads first what was
    # kept last.
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    program = tl.program_id(0).to(tl.int64)
    first = program % groups * N
    x_ptr += program // groups * stride_x + first
    gate_ptr += program // groups * stride_gate + first
    y_ptr += program * N
    sums = tl.zeros((BLOCK_N // FOLD,), tl.float32)
    for tile in tl.range(0, TILES, num_stages=1):
        cols = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        mask = cols < N
        s = tl.load(x_ptr + cols, mask=mask, other=0.0, eviction_policy="evict_last").to(tl.float32)
        if not NORM_FIRST:
            gate = tl.load(gate_ptr + cols, mask=mask, other=0.0, eviction_policy="evict_last")
            s *= gate_factor(gate.to(tl.float32), ACTIVATION)
        sums += folded(s * s, FOLD)
    rstd = tl.rsqrt(tl.sum(sums, 0) / N + eps)
    for done in tl.range(0, TILES, num_stages=1):
        cols = (TILES - 1 - done) * BLOCK_N + tl.arange(0, BLOCK_N)
        mask = cols < N
        s = tl.load(x_ptr + cols, mask=mask, other=0.0).to(tl.float32)
        gate = tl.load(gate_ptr + cols, mask=mask, other=0.0).to(tl.float32)
        if not NORM_FIRST:
            s *= gate_factor(gate, ACTIVATION)
        weight = None
        if weight_ptr is not None:
            weight = tl.load(weight_ptr + first + cols, mask=mask, other=0.0)
        y = gated_norm_result(s, rstd, weight, gate, dtype, NORM_FIRST, ACTIVATION, CASTING_MODE)
        tl.store(y_ptr + cols, y.to(dtype), mask=mask, cache_modifier=".cs")


def launch_two_pass(
    plan: TwoPass, tensors: tuple[Any, ...], sizes: tuple[Any, ...], constants: dict[str, Any]
) -> None:
    M, N, groups, *_ = sizes
    launch(
        gated_rms_norm_two_pass_kernel, (M * groups,), tensors[0],
        *tensors, *sizes,
        **constants, BLOCK_N=plan.BLOCK_N, TILES=cdiv(N, plan.BLOCK_N),
        # A thread writes 16 bytes at once.
        FOLD=min(plan.BLOCK_N, 16 // tensors[-1].element_size()),
        num_warps=plan.num_warps,
    )  # fmt: skip
