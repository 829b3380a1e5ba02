"""divergence of the kind cosine. M tokens, V classes."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ...common.losses.divergence import DivergenceOptions
from ...common.losses.divergence_math import cosine_of, norm_of
from ...common.losses.loss_math import effective
from ...common.sizes import cdiv
from ..launch import WholeRow, launch
from .cross_entropy import Online


@triton.jit
def _load_counted(ptr, mask, scale, softcap):
    """Load a tile of scaled and capped logits, 0 where masked off."""
    x = tl.load(ptr, mask=mask, other=0.0).to(tl.float32)
    return effective(x, scale, softcap)


@triton.jit(do_not_specialize=["M", "ignore_index"])
def _cosine_kernel(
    student_ptr, teacher_ptr, target_ptr,
    divergence_ptr, cosine_ptr, student_norm_ptr, teacher_norm_ptr, zero_ptr, other_zero_ptr,
    M, V, W, stride_student, stride_teacher, ignore_index,
    student_scale, teacher_scale, student_softcap, teacher_softcap,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # Rows are read once. A class that one side lacks is 0 there.
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    row_mask = rows < M
    counted = row_mask
    if target_ptr is not None:
        target = tl.load(target_ptr + rows, mask=row_mask, other=0).to(tl.int64)
        counted = row_mask & (target != ignore_index)
    student_ptr += rows[:, None] * stride_student
    teacher_ptr += rows[:, None] * stride_teacher
    counted_rows = counted[:, None]
    products = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    student_squares = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    teacher_squares = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in tl.range(0, tl.maximum(V, W), BLOCK_N, num_stages=1):
        cols = (start + tl.arange(0, BLOCK_N))[None, :]
        x = _load_counted(
            student_ptr + cols, counted_rows & (cols < V), student_scale, student_softcap
        )
        y = _load_counted(
            teacher_ptr + cols, counted_rows & (cols < W), teacher_scale, teacher_softcap
        )
        products += x * y
        student_squares += x * x
        teacher_squares += y * y
    student_norm = norm_of(tl.sum(student_squares, 1))
    teacher_norm = norm_of(tl.sum(teacher_squares, 1))
    cosine = cosine_of(tl.sum(products, 1), student_norm, teacher_norm)
    tl.store(divergence_ptr + rows, tl.where(counted, 1.0 - cosine, 0.0), mask=row_mask)
    tl.store(cosine_ptr + rows, tl.where(counted, cosine, 0.0), mask=row_mask)
    tl.store(student_norm_ptr + rows, tl.where(counted, student_norm, 0.0), mask=row_mask)
    tl.store(teacher_norm_ptr + rows, tl.where(counted, teacher_norm, 0.0), mask=row_mask)
    tl.store(zero_ptr + rows, tl.zeros((BLOCK_M,), tl.float32), mask=row_mask)
    tl.store(other_zero_ptr + rows, tl.zeros((BLOCK_M,), tl.float32), mask=row_mask)


def cosines(
    options: DivergenceOptions, student: Tensor, teacher: Tensor, target: Tensor | None,
    results: tuple[Tensor, ...], plan: WholeRow | Online,
) -> None:  # fmt: skip
    """Fill the six results of each token, of which the cosine uses four, and sets the others to 0.
    student: (M, V) and teacher: (M, W), with unit stride in the last dimension."""
    (M, V), W = student.shape, teacher.shape[1]
    BLOCK_M = plan.BLOCK_M if isinstance(plan, WholeRow) else 1
    launch(
        _cosine_kernel, (cdiv(M, BLOCK_M),), student,
        student, teacher, target, *results,
        M, V, W, student.stride(0), teacher.stride(0), options.ignore_index, *options.scalars[1:],
        BLOCK_M=BLOCK_M, BLOCK_N=plan.BLOCK_N, num_warps=plan.num_warps,
    )  # fmt: skip
