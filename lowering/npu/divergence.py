"""divergence. M tokens, V classes."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ... import library
from ...ops.divergence import limit
from ..divergence_math import scalars, shares, slopes
from ..sizes import cdiv
from ..tensors import flat
from ..triton_math import LOWEST
from . import tiling
from .tile import load, load_logits, online_updated, remaining, tile_offsets
from .tiling import COSTS, Cost, launch

COSTS.update(
    {
        # For jsd and tvd, which take most. whole (1, 1024): 47.1%, (1, 2048): 93.2%.
        # wide (1, 2048): 63.8% | 75.3%.
        "divergence": Cost({2: 90.0, 4: 90.0}, {2: 61.3, 4: 72.3}),
        # (1, 2048): 79.5% | 87.8%, (2, 512): 56.1% | 56.1%, (64, 16): 62.6% in bf16.
        "divergence_backward": Cost({2: 76.4, 4: 84.3}, {2: 76.4, 4: 84.3}),
    }
)


@triton.jit
def _load(ptr, offsets, mask, scale):
    """Load logits and scale them, with -inf where masked off."""
    return load_logits(ptr, offsets, mask) * scale


@triton.jit
def _log_softmax(x):
    """The logarithms of the probabilities of whole rows, and lse."""
    highest = tl.maximum(tl.max(x, axis=1), LOWEST)[:, None]
    lse = highest + tl.log(tl.sum(tl.exp(x - highest), axis=1)[:, None])
    return x - lse, lse


@triton.jit(do_not_specialize=["M"])
def _divergence_kernel(
    student_ptr, teacher_ptr, divergence_ptr, share_ptr, student_lse_ptr, teacher_lse_ptr,
    M, V, beta, student_scale, teacher_scale,
    KIND: tl.constexpr, WHOLE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # If the rows are WHOLE in the tile, they are read once. If not, the first pass is an online
    # softmax of both: a running maximum, and a sum of exponentials relative to it.
    rows, cols, offsets = tile_offsets(V, BLOCK_M, BLOCK_N)
    for tile in tl.range(tl.program_id(0).to(tl.int64), tl.cdiv(M, BLOCK_M), tl.num_programs(0)):
        row = tile * BLOCK_M
        row_mask = rows < remaining(M, row, BLOCK_M)
        if WHOLE:
            mask = row_mask & (cols < V)
            x = _load(student_ptr + row * V, offsets, mask, student_scale)
            log_q, student_lse = _log_softmax(x)
            y = _load(teacher_ptr + row * V, offsets, mask, teacher_scale)
            log_p, teacher_lse = _log_softmax(y)
            student, teacher = shares(log_p, log_q, tl.exp(log_p), tl.exp(log_q), beta, KIND)
            share = tl.sum(student, axis=1)[:, None]
            divergence = share + tl.sum(teacher, axis=1)[:, None]
        else:
            student_max = tl.full((BLOCK_M, 1), LOWEST, tl.float32)
            teacher_max = tl.full((BLOCK_M, 1), LOWEST, tl.float32)
            student_sum = tl.zeros((BLOCK_M, 1), tl.float32)
            teacher_sum = tl.zeros((BLOCK_M, 1), tl.float32)
            for col in tl.range(0, V, BLOCK_N):
                start = row * V + col
                mask = row_mask & (cols < remaining(V, col, BLOCK_N))
                x = _load(student_ptr + start, offsets, mask, student_scale)
                student_max, student_sum = online_updated(x, student_max, student_sum)
                y = _load(teacher_ptr + start, offsets, mask, teacher_scale)
                teacher_max, teacher_sum = online_updated(y, teacher_max, teacher_sum)
            student_lse = student_max + tl.log(student_sum)
            teacher_lse = teacher_max + tl.log(teacher_sum)
            share = tl.zeros((BLOCK_M, 1), tl.float32)
            divergence = tl.zeros((BLOCK_M, 1), tl.float32)
            for col in tl.range(0, V, BLOCK_N):
                start = row * V + col
                mask = row_mask & (cols < remaining(V, col, BLOCK_N))
                log_q = _load(student_ptr + start, offsets, mask, student_scale) - student_lse
                log_p = _load(teacher_ptr + start, offsets, mask, teacher_scale) - teacher_lse
                student, teacher = shares(log_p, log_q, tl.exp(log_p), tl.exp(log_q), beta, KIND)
                share += tl.sum(student, axis=1)[:, None]
                divergence += tl.sum(teacher, axis=1)[:, None]
            divergence += share
        tl.store(divergence_ptr + row + rows, divergence, mask=row_mask)
        tl.store(share_ptr + row + rows, share, mask=row_mask)
        tl.store(student_lse_ptr + row + rows, student_lse, mask=row_mask)
        tl.store(teacher_lse_ptr + row + rows, teacher_lse, mask=row_mask)


@triton.jit(do_not_specialize=["M"])
def _divergence_backward_kernel(
    student_ptr, teacher_ptr, grad_ptr, divergence_ptr, share_ptr, student_lse_ptr,
    teacher_lse_ptr, dstudent_ptr, dteacher_ptr,
    M, V, beta, student_scale, teacher_scale,
    KIND: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    rows, cols, offsets = tile_offsets(V, BLOCK_M, BLOCK_N)
    for tile in tl.range(tl.program_id(0).to(tl.int64), tl.cdiv(M, BLOCK_M), tl.num_programs(0)):
        row = tile * BLOCK_M
        row_mask = rows < remaining(M, row, BLOCK_M)
        grad = load(grad_ptr + row, rows, row_mask)
        divergence = load(divergence_ptr + row, rows, row_mask)
        share = load(share_ptr + row, rows, row_mask)
        student_lse = load(student_lse_ptr + row, rows, row_mask)
        teacher_lse = load(teacher_lse_ptr + row, rows, row_mask)
        for col in tl.range(0, V, BLOCK_N):
            start = row * V + col
            mask = row_mask & (cols < remaining(V, col, BLOCK_N))
            log_q = _load(student_ptr + start, offsets, mask, student_scale) - student_lse
            log_p = _load(teacher_ptr + start, offsets, mask, teacher_scale) - teacher_lse
            # lse is inf for an ignored token, whose logits may be NaN.
            log_q = tl.where(student_lse != float("inf"), log_q, -float("inf"))
            log_p = tl.where(teacher_lse != float("inf"), log_p, -float("inf"))
            student, teacher = slopes(
                log_p, log_q, tl.exp(log_p), tl.exp(log_q), divergence, share, beta, KIND
            )
            if dstudent_ptr is not None:
                dx = (grad * student * student_scale).to(dstudent_ptr.dtype.element_ty)
                tl.store(dstudent_ptr + start + offsets, dx, mask=mask)
            if dteacher_ptr is not None:
                dy = (grad * teacher * teacher_scale).to(dteacher_ptr.dtype.element_ty)
                tl.store(dteacher_ptr + start + offsets, dy, mask=mask)


def unless_ignored(call: Any, values: Tensor, ignored: float) -> Tensor:
    """The values of tokens, and another for those that are ignored; flat."""
    if call.target is None:
        return flat(values)
    return flat(torch.where(call.target == call.ignore_index, ignored, values))


@library.kernel("divergence_forward", "npu")
def divergence_forward(call, divergence, student_share, student_lse, teacher_lse, plan):
    student, teacher = tiling.rows(call.student_logits), tiling.rows(call.teacher_logits)
    M, V = student.shape
    plan = plan or tiling.plan("divergence", V, student, teacher)
    results = (divergence, student_share, student_lse, teacher_lse)
    launch(
        _divergence_kernel, plan, cdiv(M, plan.BLOCK_M),
        student, teacher, *(flat(result) for result in results),
        M, V, *scalars(call),
        KIND=limit(call.kind, call.beta), WHOLE=plan.whole(V),
    )  # fmt: skip
    if call.target is not None:
        for result in results:
            result.masked_fill_(call.target == call.ignore_index, 0.0)


@library.kernel("divergence_backward", "npu")
def divergence_backward(call, dstudent_logits, dteacher_logits, plan):
    student, teacher = tiling.rows(call.student_logits), tiling.rows(call.teacher_logits)
    M, V = student.shape
    plan = plan or tiling.plan("divergence_backward", V, student, teacher)
    infinite = float("inf")
    launch(
        _divergence_backward_kernel, plan, cdiv(M, plan.BLOCK_M),
        student, teacher, unless_ignored(call, call.ddivergence, 0.0),
        flat(call.divergence), flat(call.student_share),
        unless_ignored(call, call.student_lse, infinite),
        unless_ignored(call, call.teacher_lse, infinite),
        dstudent_logits, dteacher_logits,
        M, V, *scalars(call),
        KIND=limit(call.kind, call.beta),
    )  # fmt: skip
