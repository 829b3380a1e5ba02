"""A hint that Triton has no word for: bring to the L2 cache what will be loaded soon."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def prefetch_row(row_ptr, N, ROW: tl.constexpr):
    """Ask for N elements. NVIDIA's GPUs alone know the instruction; ROW is a power of 2 from N."""
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
