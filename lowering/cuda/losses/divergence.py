"""divergence, and its kind cosine. M tokens, V classes."""

from __future__ import annotations

from collections.abc import Sequence

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
from ...common.triton_math import LOWEST, flushed_exp, rounded_lse
from ..launch import WholeRow, launch, launch_whole_rows, plan_whole_rows, rows
from .cross_entropy import Online, SplitRows, plan_backward


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


@triton.jit
def _load(ptr, mask, scale, softcap, policy: tl.constexpr, other=-float("inf")):
    """Load a tile of scaled and capped logits, -inf where masked off, or 0 with other=0."""
    x = tl.load(ptr, mask=mask, other=other, eviction_policy=policy).to(tl.float32)
    x = effective(x, scale, softcap)
    # softcap maps the -inf of masked elements to a finite number.
    if softcap is not None:
        x = tl.where(mask, x, other)
    return x


@triton.jit
def _log_softmax(x):
    """Compute the logarithms of the probabilities of whole rows, and lse and its error."""
    maximum = tl.maximum(tl.max(x, 1), LOWEST)
    shifted = x - maximum[:, None]
    log_sum = tl.log(tl.sum(flushed_exp(shifted), 1))
    lse, error = rounded_lse(maximum, log_sum)
    return shifted - log_sum[:, None], lse, error


@triton.jit(do_not_specialize=["M", "ignore_index"])
def _divergence_kernel(
    student_ptr, teacher_ptr, target_ptr,
    divergence_ptr, share_ptr, student_lse_ptr, teacher_lse_ptr,
    student_error_ptr, teacher_error_ptr,
    M, V, W, stride_student, stride_teacher, ignore_index,
    beta, student_scale, teacher_scale, student_softcap, teacher_softcap,
    KIND: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    row_mask = rows < M
    counted = row_mask
    if target_ptr is not None:
        target = tl.load(target_ptr + rows, mask=row_mask, other=0).to(tl.int64)
        counted = row_mask & (target != ignore_index)
    cols = tl.arange(0, BLOCK_N)[None, :]
    counted_rows = counted[:, None]
    x = _load(
        student_ptr + rows[:, None] * stride_student + cols,
        counted_rows & (cols < V), student_scale, student_softcap, "",
    )  # fmt: skip
    y = _load(
        teacher_ptr + rows[:, None] * stride_teacher + cols,
        counted_rows & (cols < W), teacher_scale, teacher_softcap, "",
    )  # fmt: skip
    log_q, student_lse, student_error = _log_softmax(x)
    log_p, teacher_lse, teacher_error = _log_softmax(y)
    p, q = flushed_exp(log_p), flushed_exp(log_q)
    student, teacher = shares(log_p, log_q, p, q, beta, KIND, True)
    share = tl.sum(student, 1)
    divergence = share + tl.sum(teacher, 1)
    tl.store(divergence_ptr + rows, tl.where(counted, divergence, 0.0), mask=row_mask)
    tl.store(share_ptr + rows, tl.where(counted, share, 0.0), mask=row_mask)
    tl.store(student_lse_ptr + rows, tl.where(counted, student_lse, 0.0), mask=row_mask)
    tl.store(teacher_lse_ptr + rows, tl.where(counted, teacher_lse, 0.0), mask=row_mask)
    tl.store(student_error_ptr + rows, tl.where(counted, student_error, 0.0), mask=row_mask)
    tl.store(teacher_error_ptr + rows, tl.where(counted, teacher_error, 0.0), mask=row_mask)


@triton.jit
def _lanes_updated(x, maxima, sums, FOLD: tl.constexpr):
    """Add a tile to each lane's maximum and its sum of exponentials relative to that."""
    LANES: tl.constexpr = maxima.numel
    lanes = tl.reshape(x, (LANES, FOLD))
    higher = tl.maximum(maxima, tl.max(lanes, 1))
    exponentials = tl.sum(flushed_exp(lanes - higher[:, None]), 1)
    return higher, sums * flushed_exp(maxima - higher) + exponentials


@triton.jit
def _lanes_lse(maxima, sums):
    """Combine the lanes of a row into lse and its rounding error."""
    maximum = tl.max(maxima, 0)
    return rounded_lse(maximum, tl.log(tl.sum(sums * flushed_exp(maxima - maximum), 0)))


@triton.jit(do_not_specialize=["ignore_index"])
def _divergence_two_pass_kernel(
    student_ptr, teacher_ptr, target_ptr,
    known_student_ptr, known_teacher_ptr, known_student_error_ptr, known_teacher_error_ptr,
    divergence_ptr, share_ptr, student_lse_ptr, teacher_lse_ptr,
    student_error_ptr, teacher_error_ptr,
    V, W, stride_student, stride_teacher, ignore_index,
    beta, student_scale, teacher_scale, student_softcap, teacher_softcap,
    KIND: tl.constexpr, BLOCK_N: tl.constexpr, FOLD: tl.constexpr,
):  # fmt: skip
    # A program has one row of the student and one of the teacher. A lane is FOLD neighbours of each
    # tile, which one thread holds; lanes exchange nothing before the row's end. The first pass asks
    # the L2 cache to keep the rows, and the second goes backwards and finds them there. Where lse
    # is known, there is only the second.
    LANES: tl.constexpr = BLOCK_N // FOLD
    row = tl.program_id(0).to(tl.int64)
    student_ptr += row * stride_student
    teacher_ptr += row * stride_teacher
    counted = True
    if target_ptr is not None:
        counted = tl.load(target_ptr + row).to(tl.int64) != ignore_index
        # Nothing of an ignored token is read: every sum is 0.
        V = tl.where(counted, V, 0)
        W = tl.where(counted, W, 0)
    size = tl.maximum(V, W)
    if known_student_ptr is None:
        student_maxima = tl.full((LANES,), LOWEST, tl.float32)
        teacher_maxima = tl.full((LANES,), LOWEST, tl.float32)
        student_sums = tl.zeros((LANES,), tl.float32)
        teacher_sums = tl.zeros((LANES,), tl.float32)
        for start in tl.range(0, size, BLOCK_N, num_stages=1):
            cols = start + tl.arange(0, BLOCK_N)
            x = _load(student_ptr + cols, cols < V, student_scale, student_softcap, "evict_last")
            y = _load(teacher_ptr + cols, cols < W, teacher_scale, teacher_softcap, "evict_last")
            student_maxima, student_sums = _lanes_updated(x, student_maxima, student_sums, FOLD)
            teacher_maxima, teacher_sums = _lanes_updated(y, teacher_maxima, teacher_sums, FOLD)
        student_lse, student_error = _lanes_lse(student_maxima, student_sums)
        teacher_lse, teacher_error = _lanes_lse(teacher_maxima, teacher_sums)
    else:
        student_lse = tl.load(known_student_ptr + row)
        teacher_lse = tl.load(known_teacher_ptr + row)
        student_error = tl.load(known_student_error_ptr + row)
        teacher_error = tl.load(known_teacher_error_ptr + row)

    student_shares = tl.zeros((LANES,), tl.float32)
    teacher_shares = tl.zeros((LANES,), tl.float32)
    for tile in tl.range(1, tl.cdiv(size, BLOCK_N) + 1, num_stages=1):
        cols = (tl.cdiv(size, BLOCK_N) - tile) * BLOCK_N + tl.arange(0, BLOCK_N)
        x = _load(student_ptr + cols, cols < V, student_scale, student_softcap, "evict_first")
        y = _load(teacher_ptr + cols, cols < W, teacher_scale, teacher_softcap, "evict_first")
        log_q = (x - student_lse) - student_error
        log_p = (y - teacher_lse) - teacher_error
        p, q = flushed_exp(log_p), flushed_exp(log_q)
        student, teacher = shares(log_p, log_q, p, q, beta, KIND, True)
        student_shares += tl.sum(tl.reshape(student, (LANES, FOLD)), 1)
        teacher_shares += tl.sum(tl.reshape(teacher, (LANES, FOLD)), 1)
    share = tl.sum(student_shares, 0)
    divergence = share + tl.sum(teacher_shares, 0)
    tl.store(divergence_ptr + row, divergence)
    tl.store(share_ptr + row, share)
    tl.store(student_lse_ptr + row, tl.where(counted, student_lse, 0.0))
    tl.store(teacher_lse_ptr + row, tl.where(counted, teacher_lse, 0.0))
    tl.store(student_error_ptr + row, tl.where(counted, student_error, 0.0))
    tl.store(teacher_error_ptr + row, tl.where(counted, teacher_error, 0.0))


@triton.jit(do_not_specialize=["M", "ignore_index"])
def _divergence_backward_kernel(
    grad_ptr, student_ptr, teacher_ptr, target_ptr,
    divergence_ptr, share_ptr, student_lse_ptr, teacher_lse_ptr,
    student_error_ptr, teacher_error_ptr, hard_ptr, hard_lse_ptr, hard_error_ptr,
    dstudent_ptr, dteacher_ptr,
    M, V, W, stride_grad, stride_student, stride_teacher, stride_dstudent, ignore_index,
    beta, student_scale, teacher_scale, student_softcap, teacher_softcap, hard_scale,
    KIND: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # dstudent may be the student's logits: a program reads a tile before it writes it.
    rows = (tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
    row_mask = rows < M
    counted = row_mask
    if target_ptr is not None:
        target = tl.load(target_ptr + rows, mask=row_mask, other=0).to(tl.int64)
        counted = row_mask & (target != ignore_index)
    grad = tl.load(grad_ptr + rows * stride_grad, mask=row_mask, other=0.0).to(tl.float32)
    divergence = tl.load(divergence_ptr + rows, mask=row_mask, other=0.0)
    share = tl.load(share_ptr + rows, mask=row_mask, other=0.0)
    student_lse = tl.load(student_lse_ptr + rows, mask=row_mask, other=0.0)
    teacher_lse = tl.load(teacher_lse_ptr + rows, mask=row_mask, other=0.0)
    student_error = tl.load(student_error_ptr + rows, mask=row_mask, other=0.0)
    teacher_error = tl.load(teacher_error_ptr + rows, mask=row_mask, other=0.0)
    hard = None
    if hard_ptr is not None:
        hard = tl.load(hard_ptr + rows, mask=row_mask, other=0.0)
        hard_lse = tl.load(hard_lse_ptr + rows, mask=row_mask, other=0.0)
        hard_error = tl.load(hard_error_ptr + rows, mask=row_mask, other=0.0)
        column = tl.where((target >= 0) & (target < V), target, -1).to(tl.int32)
    size = V
    if dteacher_ptr is not None:
        size = W
        if dstudent_ptr is not None:
            size = tl.maximum(V, W)
    first = tl.program_id(1) * BLOCK_N
    for start in tl.range(first, size, tl.num_programs(1) * BLOCK_N, num_stages=1):
        cols = (start + tl.arange(0, BLOCK_N))[None, :]
        x_ptr = student_ptr + rows * stride_student + cols
        y_ptr = teacher_ptr + rows * stride_teacher + cols
        if KIND == "cosine":
            x = _load(x_ptr, counted & (cols < V), student_scale, student_softcap, "", 0.0)
            y = _load(y_ptr, counted & (cols < W), teacher_scale, teacher_softcap, "", 0.0)
            student, teacher = cosine_slopes(x, y, student_lse, teacher_lse, share)
        else:
            x = _load(x_ptr, counted & (cols < V), student_scale, student_softcap, "")
            y = _load(y_ptr, counted & (cols < W), teacher_scale, teacher_softcap, "")
            log_q = (x - student_lse) - student_error
            log_p = (y - teacher_lse) - teacher_error
            p, q = flushed_exp(log_p), flushed_exp(log_q)
            student, teacher = slopes(log_p, log_q, p, q, divergence, share, beta, KIND, True)
        # The gradient of an ignored token's result may be inf or NaN.
        if dstudent_ptr is not None:
            sharp = None
            if hard_ptr is not None:
                label = tl.where(cols == column, 1.0, 0.0)
                if student_softcap is not None:
                    z = x * hard_scale
                else:
                    # Not x, which the temperature has rounded.
                    z = _load(x_ptr, counted & (cols < V), hard_scale, None, "")
                sharp = flushed_exp((z - hard_lse) - hard_error) - label
            dx = logits_gradient(student, grad, x, student_scale, student_softcap, hard, sharp)
            dx = tl.where(counted, dx, 0.0).to(dstudent_ptr.dtype.element_ty)
            inside = row_mask & (cols < V)
            tl.store(dstudent_ptr + rows * stride_dstudent + cols, dx, mask=inside)
        if dteacher_ptr is not None:
            dy = logits_gradient(teacher, grad, y, teacher_scale, teacher_softcap, None, None)
            dy = tl.where(counted, dy, 0.0).to(dteacher_ptr.dtype.element_ty)
            tl.store(dteacher_ptr + rows * W + cols, dy, mask=row_mask & (cols < W))


def plan_forward(logits: Tensor, V: int) -> WholeRow | Online:
    """Plan whole rows up to V = 4096, and two passes beyond. V is the longer of the two
    vocabularies.

    In bfloat16 on an H200, jsd with tl.log: (16384, 8192) 0.417 ms, whole rows 0.451;
    (8192, 32768) 0.781, in tiles of 4096 with 512 threads 0.805; (2048, 151936) 0.952 and 0.943.
    """
    return plan_whole_rows(V, 1024) if V <= 4096 else Online(2048, 256)


def divergences(
    options: DivergenceOptions, student_logits: Tensor, teacher_logits: Tensor,
    target: Tensor | None, results: tuple[Tensor, ...], plan: WholeRow | Online | None = None,
    known: Sequence[Tensor] | None = None,
) -> None:  # fmt: skip
    """Fill the six results of each token. `known` is described in
    lowering/common/losses/divergence.py."""
    student, teacher = rows(student_logits), rows(teacher_logits)
    (M, V), W = student.shape, teacher.shape[1]
    if M == 0:
        return
    plan = plan or plan_forward(student, max(V, W))
    # Only the kernel of two passes takes a known lse.
    if known is not None and isinstance(plan, WholeRow):
        plan = Online(min(plan.BLOCK_N, 2048), plan.threads)
    if options.kind == "cosine":
        cosines(options, student, teacher, target, results, plan)
        return
    sizes = (V, W, student.stride(0), teacher.stride(0), options.ignore_index)
    if isinstance(plan, WholeRow):
        arguments = (student, teacher, target, *results, M, *sizes, *options.scalars)
        launch_whole_rows(_divergence_kernel, plan, student, *arguments, KIND=options.kind)
    else:
        # A thread loads 16 bytes at once.
        fold = min(plan.BLOCK_N, 16 // student.element_size())
        launch(
            _divergence_two_pass_kernel, (M,), student,
            student, teacher, target, *(known or (None,) * 4), *results, *sizes, *options.scalars,
            KIND=options.kind, BLOCK_N=plan.BLOCK_N, FOLD=fold, num_warps=plan.num_warps,
        )  # fmt: skip


def gradients(
    options: DivergenceOptions, grad: Tensor, student_logits: Tensor, teacher_logits: Tensor,
    target: Tensor | None, saved: tuple[Tensor, ...],
    dstudent: Tensor | None, dteacher: Tensor | None,
    hard: Hard | None = None, plan: SplitRows | None = None,
) -> None:  # fmt: skip
    """Fill dstudent, which may be the student's logits themselves, and dteacher.

    grad: (M,) of any stride, also 0. dstudent: (M, V) with unit stride in the last dimension;
    dteacher: (M, W), contiguous. saved are the results of `divergences`.
    """
    student, teacher = rows(student_logits), rows(teacher_logits)
    (M, V), W = student.shape, teacher.shape[1]
    if M == 0:
        return
    plan = plan or plan_backward(student)
    *of_labels, hard_scale = hard or (None,) * 4
    size = max(V if dstudent is not None else 0, W if dteacher is not None else 0)
    launch(
        _divergence_backward_kernel,
        (cdiv(M, plan.BLOCK_M), min(cdiv(size, plan.BLOCK_N), plan.programs)), student,
        grad, student, teacher, target, *saved, *of_labels, dstudent, dteacher,
        M, V, W, grad.stride(0), student.stride(0), teacher.stride(0),
        0 if dstudent is None else dstudent.stride(0), options.ignore_index,
        *options.scalars, hard_scale,
        KIND=options.kind, BLOCK_M=plan.BLOCK_M, BLOCK_N=plan.BLOCK_N, num_warps=plan.num_warps,
    )  # fmt: skip


register("cuda", divergences, gradients)
