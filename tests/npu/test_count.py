"""The counted instructions and bytes agree with the source of the kernels."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from count import Counts, count
from launches import specialised
from lower import lower
from plan import compiled
from toolchain import COMPILERS, missing_compiler

NEWEST = list(COMPILERS)[-1]
PROGRAMS = 5


@triton.jit(do_not_specialize=["M"])
def _scaled(x_ptr, y_ptr, M, N, WALKS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Compute y = x * x, after WALKS - 1 sums over the row, with PROGRAMS programs."""
    cols = tl.arange(0, BLOCK_N)
    for row in tl.range(tl.program_id(0).to(tl.int64), M, tl.num_programs(0)):
        total = tl.zeros((BLOCK_N,), tl.float32)
        for _ in tl.static_range(WALKS - 1):
            for col in tl.range(0, N, BLOCK_N):
                total += tl.load(x_ptr + row * N + col + cols, mask=cols < N - col, other=0.0)
        sum = tl.sum(total, 0)
        for col in tl.range(0, N, BLOCK_N):
            x = tl.load(x_ptr + row * N + col + cols, mask=cols < N - col, other=0.0)
            y = x * x if WALKS == 1 else x * sum
            tl.store(y_ptr + row * N + col + cols, y, mask=cols < N - col)


@pytest.mark.parametrize(("M", "N"), [(17, 4096), (3, 4096), (17, 5000)])
def test_counts_are_those_of_the_source(needs, M, N):
    needs(missing_compiler(NEWEST))
    block, x = 1024, torch.empty(16)
    counts = {}
    for walks in (1, 2, 3):
        options = {"WALKS": walks, "BLOCK_N": block}
        launch = specialised(_scaled, (PROGRAMS,), (x, x, M, N), options)
        counts[walks] = count(launch, compiled(lower(launch).mlir, NEWEST)[0])
        assert counts[walks].bytes == (walks + 1) * M * N * 4
    tiles = M * -(-N // block)
    # One multiplication of 16 instructions, and a fill of the tile that N cuts.
    filled = M * 16 if N % block else 0
    assert counts[1].instructions == tiles * 16 + filled
    # A further walk is an addition, and another such fill.
    assert counts[3].instructions - counts[2].instructions == tiles * 16 + filled


@triton.jit(do_not_specialize=["M"])
def _cubed_or_zero(x_ptr, y_ptr, target_ptr, M, BLOCK_N: tl.constexpr):
    """Compute y = x^3 in the rows that have a target, and 0 in others."""
    cols = tl.arange(0, BLOCK_N)
    for row in tl.range(tl.program_id(0).to(tl.int64), M, tl.num_programs(0)):
        if tl.load(target_ptr + row) < 0:
            tl.store(y_ptr + row * BLOCK_N + cols, tl.zeros((BLOCK_N,), tl.float32))
        else:
            x = tl.load(x_ptr + row * BLOCK_N + cols)
            tl.store(y_ptr + row * BLOCK_N + cols, x * x * x)


def test_a_condition_on_data_counts_the_longer_branch(needs):
    needs(missing_compiler(NEWEST))
    M, block, x, target = 17, 1024, torch.empty(16), torch.empty(16, dtype=torch.int64)
    launch = specialised(_cubed_or_zero, (PROGRAMS,), (x, x, target, M), {"BLOCK_N": block})
    counts = count(launch, compiled(lower(launch).mlir, NEWEST)[0])
    # Two multiplications of 16 instructions; a program makes its zeros once, before the rows.
    assert counts == Counts(instructions=M * 2 * 16 + PROGRAMS * 16, bytes=M * 2 * block * 4)


def test_counts_are_sums():
    assert Counts(1, 2) + Counts(3, 4) * 2 == Counts(7, 10)
