"""divergence, and its kind cosine. M tokens, V classes of the student and W of the teacher."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...common.losses.divergence import DivergenceOptions, Hard, register
from ...common.losses.divergence_math import (
    cosine_of,
    cosine_slopes,
    logits_gradient,
    norm_of,
    shares,
    slopes,
)
from ...common.losses.loss_math import effective
from ...common.tensors import cdiv
from ...common.triton_math import LOWEST, rounded_lse
from .. import tiling
from ..tile import load, load_logits, online_updated, remaining, tile_offsets, within
from ..tiling import COSTS, Cost, Plan, launch

# (1, 4096): 54.5%, (16, 128): 27.8%.
COSTS["cosine"] = Cost({2: 31.0, 4: 31.0}, {2: 31.0, 4: 31.0})
# With both caps. (1, 4096): 91.9%.
COSTS["cosine_capped"] = Cost({2: 44.2, 4: 44.2}, {2: 44.2, 4: 44.2})


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
    name = "cosine_capped" if _capped(options) else "cosine"
    plan = plan or tiling.plan(name, size, student, teacher)
    launch(
        _cosine_kernel, plan, cdiv(M, plan.BLOCK_M),
        student, teacher, *results[:4],
        M, V, None if W == V else W, size, *options.scalars[1:],
    )  # fmt: skip
    for error in results[4:]:
        error.zero_()


# Measured for jsd and tvd, which take the most. whole (1, 1024): 47.1%, (1, 2048): 93.2%.
# wide (1, 2048): 63.8% | 75.3%.
COSTS["divergence"] = Cost({2: 90.0, 4: 90.0}, {2: 61.3, 4: 72.3})
# (1, 2048): 79.5% | 87.8%, (2, 512): 56.1% | 56.1%, (64, 16): 62.6% in bf16.
# With both caps. (1, 1024): 99.8%.
COSTS["divergence_capped"] = Cost({2: 191.6, 4: 191.6}, {2: 191.6, 4: 191.6})
COSTS["divergence_backward"] = Cost({2: 76.4, 4: 84.3}, {2: 76.4, 4: 84.3})
# With both caps and the cross-entropy of labels.
COSTS["divergence_options_backward"] = Cost({2: 150.0, 4: 150.0}, {2: 150.0, 4: 150.0})


@triton.jit
def _load(ptr, offsets, mask, cols, count, scale, softcap):
    """Load a tile of scaled and capped logits, with -inf past the last of `count` columns."""
    x = effective(load_logits(ptr, offsets, mask), scale, softcap)
    if softcap is not None:
        # Adding log(0) makes columns past `count` -inf again: the cap has made every logit finite.
        x += tl.log(within(cols, count))
    return x


@triton.jit
def _log_softmax(x):
    """Return the log-probabilities of whole rows, and their lse and its rounding error."""
    highest = tl.maximum(tl.max(x, axis=1), LOWEST)[:, None]
    shifted = x - highest
    log_sum = tl.log(tl.sum(tl.exp(shifted), axis=1)[:, None])
    lse, error = rounded_lse(highest, log_sum)
    return shifted - log_sum, lse, error


@triton.jit(do_not_specialize=["M"])
def _divergence_kernel(
    student_ptr, teacher_ptr,
    known_student_ptr, known_teacher_ptr, known_student_error_ptr, known_teacher_error_ptr,
    divergence_ptr, share_ptr, student_lse_ptr, teacher_lse_ptr,
    student_error_ptr, teacher_error_ptr,
    M, V, W, size, beta, student_scale, teacher_scale, student_softcap, teacher_softcap,
    KIND: tl.constexpr, WHOLE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # If the rows are WHOLE in the tile, they are read once. If not, the first pass is an online
    # softmax of both: a running maximum, and a sum of exponentials relative to it. If the caller
    # knows both lse, only the second pass runs.
    if W is None:
        # Both have V classes, and one mask.
        W = V
    rows, cols, offsets = tile_offsets(V, BLOCK_M, BLOCK_N)
    teacher_offsets = rows * W + cols
    for tile in tl.range(tl.program_id(0).to(tl.int64), tl.cdiv(M, BLOCK_M), tl.num_programs(0)):
        row = tile * BLOCK_M
        row_mask = rows < remaining(M, row, BLOCK_M)
        if WHOLE:
            mask = row_mask & (cols < V)
            x = _load(student_ptr + row * V, offsets, mask, cols, V, student_scale, student_softcap)
            log_q, student_lse, student_error = _log_softmax(x)
            mask = row_mask & (cols < W)
            y = _load(
                teacher_ptr + row * W, teacher_offsets, mask, cols, W,
                teacher_scale, teacher_softcap,
            )  # fmt: skip
            log_p, teacher_lse, teacher_error = _log_softmax(y)
            student, teacher = shares(log_p, log_q, tl.exp(log_p), tl.exp(log_q), beta, KIND, False)
            share = tl.sum(student, axis=1)[:, None]
            divergence = share + tl.sum(teacher, axis=1)[:, None]
        else:
            if known_student_ptr is None:
                student_max = tl.full((BLOCK_M, 1), LOWEST, tl.float32)
                teacher_max = tl.full((BLOCK_M, 1), LOWEST, tl.float32)
                student_sum = tl.zeros((BLOCK_M, 1), tl.float32)
                teacher_sum = tl.zeros((BLOCK_M, 1), tl.float32)
                for col in tl.range(0, size, BLOCK_N):
                    count = remaining(V, col, BLOCK_N)
                    x = _load(
                        student_ptr + row * V + col, offsets, row_mask & (cols < count),
                        cols, count, student_scale, student_softcap,
                    )  # fmt: skip
                    student_max, student_sum = online_updated(x, student_max, student_sum)
                    count = remaining(W, col, BLOCK_N)
                    y = _load(
                        teacher_ptr + row * W + col, teacher_offsets, row_mask & (cols < count),
                        cols, count, teacher_scale, teacher_softcap,
                    )  # fmt: skip
                    teacher_max, teacher_sum = online_updated(y, teacher_max, teacher_sum)
                student_lse, student_error = rounded_lse(student_max, tl.log(student_sum))
                teacher_lse, teacher_error = rounded_lse(teacher_max, tl.log(teacher_sum))
            else:
                student_lse = load(known_student_ptr + row, rows, row_mask)
                teacher_lse = load(known_teacher_ptr + row, rows, row_mask)
                student_error = load(known_student_error_ptr + row, rows, row_mask)
                teacher_error = load(known_teacher_error_ptr + row, rows, row_mask)
            share = tl.zeros((BLOCK_M, 1), tl.float32)
            divergence = tl.zeros((BLOCK_M, 1), tl.float32)
            for col in tl.range(0, size, BLOCK_N):
                count = remaining(V, col, BLOCK_N)
                x = _load(
                    student_ptr + row * V + col, offsets, row_mask & (cols < count), cols, count,
                    student_scale, student_softcap,
                )  # fmt: skip
                log_q = (x - student_lse) - student_error
                count = remaining(W, col, BLOCK_N)
                y = _load(
                    teacher_ptr + row * W + col, teacher_offsets, row_mask & (cols < count),
                    cols, count, teacher_scale, teacher_softcap,
                )  # fmt: skip
                log_p = (y - teacher_lse) - teacher_error
                p, q = tl.exp(log_p), tl.exp(log_q)
                student, teacher = shares(log_p, log_q, p, q, beta, KIND, False)
                share += tl.sum(student, axis=1)[:, None]
                divergence += tl.sum(teacher, axis=1)[:, None]
            divergence += share
        tl.store(divergence_ptr + row + rows, divergence, mask=row_mask)
        tl.store(share_ptr + row + rows, share, mask=row_mask)
        tl.store(student_lse_ptr + row + rows, student_lse, mask=row_mask)
        tl.store(teacher_lse_ptr + row + rows, teacher_lse, mask=row_mask)
        tl.store(student_error_ptr + row + rows, student_error, mask=row_mask)
        tl.store(teacher_error_ptr + row + rows, teacher_error, mask=row_mask)


@triton.jit(do_not_specialize=["M"])
def _divergence_backward_kernel(
    student_ptr, teacher_ptr, grad_ptr, divergence_ptr, share_ptr, student_lse_ptr,
    teacher_lse_ptr, student_error_ptr, teacher_error_ptr, hard_ptr, hard_lse_ptr, hard_error_ptr,
    column_ptr, dstudent_ptr, dteacher_ptr,
    M, V, W, size, beta, student_scale, teacher_scale, student_softcap, teacher_softcap,
    hard_scale,
    KIND: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    if W is None:
        # Both have V classes, and one mask.
        W = V
    rows, cols, offsets = tile_offsets(V, BLOCK_M, BLOCK_N)
    teacher_offsets = rows * W + cols
    for tile in tl.range(tl.program_id(0).to(tl.int64), tl.cdiv(M, BLOCK_M), tl.num_programs(0)):
        row = tile * BLOCK_M
        row_mask = rows < remaining(M, row, BLOCK_M)
        grad = load(grad_ptr + row, rows, row_mask)
        divergence = load(divergence_ptr + row, rows, row_mask)
        share = load(share_ptr + row, rows, row_mask)
        student_lse = load(student_lse_ptr + row, rows, row_mask)
        teacher_lse = load(teacher_lse_ptr + row, rows, row_mask)
        student_error = load(student_error_ptr + row, rows, row_mask)
        teacher_error = load(teacher_error_ptr + row, rows, row_mask)
        hard = None
        if hard_ptr is not None:
            hard = load(hard_ptr + row, rows, row_mask)
            hard_lse = load(hard_lse_ptr + row, rows, row_mask)
            hard_error = load(hard_error_ptr + row, rows, row_mask)
            column = tl.load(column_ptr + row + rows, mask=row_mask, other=0)
        for col in tl.range(0, size, BLOCK_N):
            count = remaining(V, col, BLOCK_N)
            student_tile, mask = student_ptr + row * V + col, row_mask & (cols < count)
            if KIND == "cosine":
                x = effective(load(student_tile, offsets, mask), student_scale, student_softcap)
            else:
                x = _load(
                    student_tile, offsets, mask, cols, count, student_scale, student_softcap
                )  # fmt: skip
            count = remaining(W, col, BLOCK_N)
            teacher_tile, mask = teacher_ptr + row * W + col, row_mask & (cols < count)
            if KIND == "cosine":
                y = effective(
                    load(teacher_tile, teacher_offsets, mask), teacher_scale, teacher_softcap
                )  # fmt: skip
            else:
                y = _load(
                    teacher_tile, teacher_offsets, mask, cols, count,
                    teacher_scale, teacher_softcap,
                )  # fmt: skip
            # lse is inf for an ignored token, whose logits may be NaN.
            x = tl.where(student_lse != float("inf"), x, 0.0)
            y = tl.where(teacher_lse != float("inf"), y, 0.0)
            if KIND == "cosine":
                student, teacher = cosine_slopes(x, y, student_lse, teacher_lse, share)
            else:
                log_q = (x - student_lse) - student_error
                log_p = (y - teacher_lse) - teacher_error
                p, q = tl.exp(log_p), tl.exp(log_q)
                student, teacher = slopes(log_p, log_q, p, q, divergence, share, beta, KIND, False)
            if dstudent_ptr is not None:
                sharp = None
                if hard_ptr is not None:
                    label = (cols == column - col).to(tl.float32)
                    if student_softcap is not None:
                        z = x * hard_scale
                    else:
                        # Loaded again: x has been multiplied by the temperature's scale, and
                        # rounded.
                        count = remaining(V, col, BLOCK_N)
                        mask = row_mask & (cols < count)
                        z = _load(student_tile, offsets, mask, cols, count, hard_scale, None)
                        z = tl.where(student_lse != float("inf"), z, 0.0)
                    sharp = tl.exp((z - hard_lse) - hard_error) - label
                dx = logits_gradient(student, grad, x, student_scale, student_softcap, hard, sharp)
                dx = dx.to(dstudent_ptr.dtype.element_ty)
                mask = row_mask & (cols < remaining(V, col, BLOCK_N))
                tl.store(dstudent_ptr + row * V + col + offsets, dx, mask=mask)
            if dteacher_ptr is not None:
                dy = logits_gradient(teacher, grad, y, teacher_scale, teacher_softcap, None, None)
                dy = dy.to(dteacher_ptr.dtype.element_ty)
                mask = row_mask & (cols < remaining(W, col, BLOCK_N))
                tl.store(dteacher_ptr + row * W + col + teacher_offsets, dy, mask=mask)


def divergences(
    options: DivergenceOptions, student_logits: Tensor, teacher_logits: Tensor,
    target: Tensor | None, results: tuple[Tensor, ...], plan: Plan | None = None,
    known: Sequence[Tensor] | None = None,
) -> None:  # fmt: skip
    """Fill the six results of each token, with 0 for ignored tokens.

    known: Both lse over all classes and their errors; the logits are then those of some classes.
    """
    student, teacher = tiling.rows(student_logits), tiling.rows(teacher_logits)
    (M, V), W = student.shape, teacher.shape[1]
    if M == 0:
        return
    size = max(V, W)
    if options.kind == "cosine":
        cosines(options, student, teacher, results, plan)
    else:
        name = "divergence_capped" if _capped(options) else "divergence"
        plan = plan or tiling.plan(name, size, student, teacher)
        launch(
            _divergence_kernel, plan, cdiv(M, plan.BLOCK_M),
            student, teacher, *(known or (None,) * 4), *results,
            M, V, None if W == V else W, size, *options.scalars,
            KIND=options.kind, WHOLE=known is None and plan.whole(size),
        )  # fmt: skip
    if target is not None:
        for result in results:
            result.masked_fill_(target == options.ignore_index, 0.0)


def gradients(
    options: DivergenceOptions, grad: Tensor, student_logits: Tensor, teacher_logits: Tensor,
    target: Tensor | None, saved: tuple[Tensor, ...],
    dstudent: Tensor | None, dteacher: Tensor | None,
    hard: Hard | None = None, plan: Plan | None = None,
) -> None:  # fmt: skip
    """Fill dstudent, which may be the student's logits themselves, and dteacher.

    grad: (M,) of any stride, also 0.
    saved: The results of `divergences`.
    dstudent: (M, V), contiguous; dteacher: (M, W), contiguous.
    hard: The cross-entropy of labels, whose gradient is added to dstudent.
    """
    student, teacher = tiling.rows(student_logits), tiling.rows(teacher_logits)
    (M, V), W = student.shape, teacher.shape[1]
    if M == 0:
        return
    size = max(V if dstudent is not None else 0, W if dteacher is not None else 0)
    more = hard is not None or _capped(options)
    name = "divergence_options_backward" if more else "divergence_backward"
    plan = plan or tiling.plan(name, size, student, teacher)
    divergence, share, *both_lse, student_error, teacher_error = saved
    grad, column = grad.contiguous(), None
    if target is not None:
        # An lse of inf tells the kernel that a token is ignored.
        ignored = target == options.ignore_index
        grad = torch.where(ignored, 0.0, grad)
        both_lse = [torch.where(ignored, float("inf"), lse) for lse in both_lse]
    hard_grad, hard_lse, hard_error, hard_scale = hard or (None,) * 4
    if hard is not None:
        hard_grad = torch.where(ignored, 0.0, hard_grad)
        # int32: a comparison of int64 would run as a scalar loop. No column is -1.
        column = torch.where((target >= 0) & (target < V), target, -1).int()
    launch(
        _divergence_backward_kernel, plan, cdiv(M, plan.BLOCK_M),
        student, teacher, grad, divergence, share, *both_lse, student_error, teacher_error,
        hard_grad, hard_lse, hard_error, column, dstudent, dteacher,
        M, V, None if W == V else W, size, *options.scalars, hard_scale,
        KIND=options.kind,
    )  # fmt: skip


def _capped(options: DivergenceOptions) -> bool:
    """Return whether the logits of the student or of the teacher have a softcap."""
    return options.student_softcap is not None or options.teacher_softcap is not None


register("npu", divergences, gradients)
