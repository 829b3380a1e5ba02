"""Prefetch to the L2 cache, which Triton has no function for."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def prefetch_row(row_ptr, N, ROW: tl.constexpr):
    """Prefetch a row of N elements, on NVIDIA's GPUs only. ROW is the power of 2 from N up."""
    # 64 bytes an instruction.
    STEP: tl.constexpr = 512 // row_ptr.dtype.element_ty.primitive_bitwidth
    at = tl.minimum(tl.arange(0, ROW // STEP) * STEP, N - 1)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [row_ptr + at],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
