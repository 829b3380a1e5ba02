"""The forward of rms_norm, where a program reads its row twice."""

from __future__ import annotations

import math
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ...common.sizes import cdiv
from ...common.triton_math import folded, rms_rstd, rms_scaled, rms_square, to_float32_again
from ..launch import Table, TwoPass, launch, plan_for
from .modulation import modulated_row
from .rms_norm_whole_row import load_sum


@triton.jit
def _store_tile(
    x, rstd, pointers, place, cols, N, offset,
    CASTING_MODE: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    # The pointers are at the start of the row. .cs (cache streaming): this kernel does not read its
    # output again, and the caches need not keep it.
    weight_ptr, y_ptr, s_ptr = pointers
    modulation, row, tokens = place
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    mask = cols < N
    if s_ptr is not None:
        tl.store(s_ptr + cols, x, mask=mask, cache_modifier=".cs")
    weight = None
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    y = rms_scaled(to_float32_again(x), rstd, weight, offset, dtype, CASTING_MODE)
    if tokens is not None:
        y = modulated_row(y, modulation, row // tokens, cols, mask, dtype, ROUNDS)
    tl.store(y_ptr + cols, y.to(dtype), mask=mask, cache_modifier=".cs")


@triton.jit(do_not_specialize=["M", "tokens"])
def rms_norm_two_pass_kernel(
    x_ptr, residual_ptr, weight_ptr, scale_ptr, shift_ptr, y_ptr, s_ptr,
    M, N, tokens, stride_x, stride_residual, stride_scale, stride_shift, eps, offset,
    CASTING_MODE: tl.constexpr, ROUNDS: tl.constexpr,
    BLOCK_N: tl.constexpr, TILES: tl.constexpr, FOLD: tl.constexpr,
):  # fmt: skip
    # A program has one row. Its last tile stays in registers: 2048 x 65536 takes 0.141 ms on an
    # H200, and 0.151 if the tile is loaded again. The first pass asks the caches to keep the other
    # tiles, and the second, which goes backwards, finds them there. A pipeline through shared
    # memory would only delay both. The compiler unrolls a pass whose number of tiles it knows:
    # 8192 x 16384 takes 0.132 ms, and 0.164 if TILES is not a constant.
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * stride_x
    y_ptr += row * N
    if residual_ptr is not None:
        residual_ptr += row * stride_residual
        s_ptr += row * N
    sums = tl.zeros((BLOCK_N // FOLD,), tl.float32)
    for tile in tl.range(0, TILES - 1, num_stages=1):
        cols = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        x = load_sum(x_ptr, residual_ptr, cols, cols < N, dtype, "evict_last")
        sums += folded(rms_square(x.to(tl.float32), dtype, CASTING_MODE), FOLD)
    cols = (TILES - 1) * BLOCK_N + tl.arange(0, BLOCK_N)
    x = load_sum(x_ptr, residual_ptr, cols, cols < N, dtype, "evict_first")
    sums += folded(rms_square(x.to(tl.float32), dtype, CASTING_MODE), FOLD)
    rstd = rms_rstd(tl.sum(sums, 0), N, eps, dtype, CASTING_MODE)
    pointers = (weight_ptr, y_ptr, s_ptr)
    # A norm without a modulation has no tokens of a sample either.
    modulation = (scale_ptr, shift_ptr, stride_scale, stride_shift)
    place = (modulation, row, tokens)
    _store_tile(x, rstd, pointers, place, cols, N, offset, CASTING_MODE, ROUNDS)
    for stored in tl.range(1, TILES, num_stages=1, loop_unroll_factor=3):
        cols = (TILES - 1 - stored) * BLOCK_N + tl.arange(0, BLOCK_N)
        x = load_sum(x_ptr, residual_ptr, cols, cols < N, dtype, "evict_first")
        _store_tile(x, rstd, pointers, place, cols, N, offset, CASTING_MODE, ROUNDS)


# Shares of the H200's copy rate.
TILES: Table[TwoPass] = {
    # 8192 wide 96%, 12288 95%, 16384 96%, 24576 93%, 32768 95%, 65536 90%.
    2: (
        (8192, TwoPass(2048, 256)),
        (16384, TwoPass(4096, 512)),
        (24576, TwoPass(4096, 1024)),
        (32768, TwoPass(8192, 1024)),
        (math.inf, TwoPass(16384, 1024)),
    ),
    # 8192 wide 97%, 16384 98%, 24576 96%, 32768 93%, 65536 80%.
    4: (
        (24576, TwoPass(4096, 1024)),
        (32768, TwoPass(8192, 1024)),
        (math.inf, TwoPass(16384, 1024)),
    ),
}
# With a residual 8192 x 32768 takes 98%, and in float32 97%, where tiles of 8192 take 82%.
RESIDUAL_TILES: Table[TwoPass] = {
    2: ((32768, TwoPass(8192, 1024)), (math.inf, TwoPass(16384, 1024))),
    4: ((math.inf, TwoPass(16384, 1024)),),
}


def plan_two_pass(x: Tensor, residual: Tensor | None) -> TwoPass:
    return plan_for(x, TILES if residual is None else RESIDUAL_TILES, x.shape[1])


def launch_two_pass(plan: TwoPass, x: Tensor, y: Tensor, *args: Any, **constants: Any) -> None:
    launch(
        rms_norm_two_pass_kernel, (x.shape[0],), x,
        *args,
        **constants, BLOCK_N=plan.BLOCK_N, TILES=cdiv(x.shape[1], plan.BLOCK_N),
        # A thread writes 16 bytes at once.
        FOLD=min(plan.BLOCK_N, 16 // y.element_size()),
        num_warps=plan.num_warps,
    )  # fmt: skip
