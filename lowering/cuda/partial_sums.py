"""Deterministic gradients of weights: programs store partial sums, and a kernel adds them in a
fixed order. Atomics would add them in another order in each run."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from ..common.sizes import cdiv
from .launch import dependent_launch, launch


@triton.jit
def _sum_columns(partial_ptr, out_ptr, P, N, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr):
    cols = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    sums = tl.zeros((BLOCK_P, BLOCK_N), tl.float32)
    for start in range(0, P, BLOCK_P):
        rows = start + tl.arange(0, BLOCK_P)[:, None]
        mask = (rows < P) & (cols < N)
        sums += tl.load(partial_ptr + rows.to(tl.int64) * N + cols, mask=mask, other=0.0)
    total = tl.sum(sums, 0)[None, :]
    tl.store(out_ptr + cols, total.to(out_ptr.dtype.element_ty), mask=cols < N)


@triton.jit(do_not_specialize=["P"])
def _column_sums_kernel(
    partial_ptr, out_ptr, second_partial_ptr, second_out_ptr, P, N,
    DEPENDENT: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # One gradient, or two in one launch: the second dimension of the grid is the gradient.
    if DEPENDENT:
        gdc_wait()
    if second_partial_ptr is None:
        _sum_columns(partial_ptr, out_ptr, P, N, BLOCK_P, BLOCK_N)
    else:
        if tl.program_id(1) == 0:
            _sum_columns(partial_ptr, out_ptr, P, N, BLOCK_P, BLOCK_N)
        else:
            _sum_columns(second_partial_ptr, second_out_ptr, P, N, BLOCK_P, BLOCK_N)


def partial_sums(dweight: Tensor | None, programs: int) -> Tensor | None:
    """Allocate a float32 row for each program, which stores its part of dweight there once.

    The memory is uninitialised: every program must write its whole row.
    """
    if dweight is None:
        return None
    return dweight.new_empty((programs, dweight.numel()), dtype=torch.float32)


def summed(*gradients: tuple[Tensor | None, Tensor | None]) -> None:
    """Sum the programs' rows into the gradients, in float32 and in a fixed order.

    `gradients` are one or two pairs: the `partial_sums`, and the gradient that they are added up
    in; both None if the gradient is not wanted. Two gradients have the same shape.
    """
    wanted = [(parts, out) for parts, out in gradients if parts is not None and out is not None]
    if not wanted:
        return
    parts = wanted[0][0]
    P, N = parts.shape
    # 132 x 16384 takes 8 us and 528 x 4096 takes 9; torch.sum and a cast take 15 and 26. Wider rows
    # have fewer parts, and fill the GPU with wider blocks.
    BLOCK_N = 8 if N < 4096 else 16 if N < 32768 else 64
    launch(
        _column_sums_kernel, (cdiv(N, BLOCK_N), len(wanted)), parts,
        *wanted[0], *(wanted[1] if len(wanted) > 1 else (None, None)),
        P, N,
        BLOCK_P=128, BLOCK_N=BLOCK_N, num_warps=4, **dependent_launch(parts),
    )  # fmt: skip
