"""Functions of the kernels of norms with a modulation, and of norms of each sample by itself."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from ...common.norms.modulation import Modulation
from ...common.norms.norm_math import modulated


def constants_of(modulation: Modulation) -> dict[str, Any]:
    """Return the constants and options of a forward kernel.

    Where the product y * (1 + scale) is rounded to bfloat16 or float16 and shift is added, fusion
    of floating-point operations is off: the compiler would make one operation of both, which rounds
    once.
    """
    constants: dict[str, Any] = {"ROUNDS": modulation.rounds}
    if modulation.rounds and modulation.shift is not None:
        constants["enable_fp_fusion"] = False
    return constants


@triton.jit
def modulated_row(
    y, modulation, sample, cols, mask,
    dtype: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    """Compute y * (1 + scale) + shift with the rows `sample` of scale and shift."""
    scale_ptr, shift_ptr, stride_scale, stride_shift = modulation
    scale = tl.load(scale_ptr + sample * stride_scale + cols, mask=mask, other=0.0)
    shift = None
    if shift_ptr is not None:
        shift = tl.load(shift_ptr + sample * stride_shift + cols, mask=mask, other=0.0)
    return modulated(y, scale, shift, dtype, ROUNDS)


@triton.jit
def own_sample(samples, M):
    """Return four numbers of this program: its index in the grid; its index among the programs of
    its sample; their number; and the first of the M rows of the sample. There is one sample if
    `samples` is None."""
    # index % samples is the sample. Partial sums are (programs, samples, N): with this order, the
    # index in the grid is a program's row of N.
    part = tl.program_id(0).to(tl.int64)
    if samples is not None:
        return part, part // samples, tl.num_programs(0) // samples, part % samples * M
    else:
        return part, part, tl.num_programs(0), part * 0
