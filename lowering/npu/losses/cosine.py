"""divergence of the kind cosine. M tokens, V classes of the student and W of the teacher."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ...common.losses.divergence import DivergenceOptions
from ...common.losses.divergence_math import cosine_of, norm_of
from ...common.losses.loss_math import effective
from ...common.sizes import cdiv
from .. import tiling
from ..tile import load, remaining, tile_offsets
from ..tiling import COSTS, Cost, Plan, launch

# (1, 4096): 54.5%, (16, 128): 27.8%. With both caps, (1, 4096): 62.9%.
COSTS["cosine"] = Cost({2: 31.0, 4: 31.0}, {2: 31.0, 4: 31.0})


@triton.jit(do_not_specialize=["M"])
def _cosine_kernel(
    student_ptr, teacher_ptr, divergence_ptr, cosine_ptr, student_norm_ptr, teacher_norm_ptr,
    M, V, W, size, student_scale, teacher_scale, student_softcap, teacher_softcap,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # Rows are read once. A class that student or teacher lacks is 0 there.
    if W is None:
        # Both have V classes, and one mask.
        W = V
    rows, cols, offsets = tile_offsets(V, BLOCK_M, BLOCK_N)
    teacher_offsets = rows * W + cols
    for tile in tl.range(tl.program_id(0).to(tl.int64), tl.cdiv(M, BLOCK_M), tl.num_programs(0)):
        row = tile * BLOCK_M
        row_mask = rows < remaining(M, row, BLOCK_M)
        products = tl.zeros((BLOCK_M, 1), tl.float32)
        student_squares = tl.zeros((BLOCK_M, 1), tl.float32)
        teacher_squares = tl.zeros((BLOCK_M, 1), tl.float32)
        for col in tl.range(0, size, BLOCK_N):
            mask = row_mask & (cols < remaining(V, col, BLOCK_N))
            x = load(student_ptr + row * V + col, offsets, mask)
            x = effective(x, student_scale, student_softcap)
            mask = row_mask & (cols < remaining(W, col, BLOCK_N))
            y = load(teacher_ptr + row * W + col, teacher_offsets, mask)
            y = effective(y, teacher_scale, teacher_softcap)
            products += tl.sum(x * y, axis=1)[:, None]
            student_squares += tl.sum(x * x, axis=1)[:, None]
            teacher_squares += tl.sum(y * y, axis=1)[:, None]
        student_norm = norm_of(student_squares)
        teacher_norm = norm_of(teacher_squares)
        cosine = cosine_of(products, student_norm, teacher_norm)
        tl.store(divergence_ptr + row + rows, 1.0 - cosine, mask=row_mask)
        tl.store(cosine_ptr + row + rows, cosine, mask=row_mask)
        tl.store(student_norm_ptr + row + rows, student_norm, mask=row_mask)
        tl.store(teacher_norm_ptr + row + rows, teacher_norm, mask=row_mask)


def cosines(
    options: DivergenceOptions, student: Tensor, teacher: Tensor, results: tuple[Tensor, ...],
    plan: Plan | None,
) -> None:  # fmt: skip
    """Fill the six results of each token, as if none were ignored. student: (M, V) and teacher:
    (M, W), contiguous."""
    (M, V), W = student.shape, teacher.shape[1]
    size = max(V, W)
    plan = plan or tiling.plan("cosine", size, student, teacher)
    launch(
        _cosine_kernel, plan, cdiv(M, plan.BLOCK_M),
        student, teacher, *results[:4],
        M, V, None if W == V else W, size, *options.scalars[1:],
    )  # fmt: skip
    for error in results[4:]:
        error.zero_()
