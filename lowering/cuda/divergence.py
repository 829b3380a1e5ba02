"""divergence. M tokens, V classes."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ... import library
from ...ops.divergence import limit
from ..divergence_math import scalars, shares, slopes
from ..sizes import cdiv
from ..tensors import flat
from ..triton_math import LOWEST, flushed_exp
from .cross_entropy import Online, SplitRows, plan_backward
from .launch import WholeRow, launch, launch_whole_rows, plan_whole_rows, rows


@triton.jit
def _log_softmax(x):
    """The logarithms of the probabilities of whole rows, and lse."""
    maximum = tl.maximum(tl.max(x, 1), LOWEST)
    lse = maximum + tl.log(tl.sum(flushed_exp(x - maximum[:, None]), 1))
    return x - lse[:, None], lse


@triton.jit(do_not_specialize=["M", "ignore_index"])
def _divergence_kernel(
    student_ptr, teacher_ptr, target_ptr,
    divergence_ptr, share_ptr, student_lse_ptr, teacher_lse_ptr,
    M, V, stride_student, stride_teacher, ignore_index, beta, student_scale, teacher_scale,
    KIND: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    row_mask = rows < M
    counted = row_mask
    if target_ptr is not None:
        target = tl.load(target_ptr + rows, mask=row_mask, other=0).to(tl.int64)
        counted = row_mask & (target != ignore_index)
    cols = tl.arange(0, BLOCK_N)[None, :]
    mask = counted[:, None] & (cols < V)
    x = tl.load(
        student_ptr + rows[:, None] * stride_student + cols, mask=mask, other=-float("inf")
    ).to(tl.float32)
    y = tl.load(
        teacher_ptr + rows[:, None] * stride_teacher + cols, mask=mask, other=-float("inf")
    ).to(tl.float32)
    log_q, student_lse = _log_softmax(x * student_scale)
    log_p, teacher_lse = _log_softmax(y * teacher_scale)
    student, teacher = shares(log_p, log_q, flushed_exp(log_p), flushed_exp(log_q), beta, KIND)
    share = tl.sum(student, 1)
    divergence = share + tl.sum(teacher, 1)
    tl.store(divergence_ptr + rows, tl.where(counted, divergence, 0.0), mask=row_mask)
    tl.store(share_ptr + rows, tl.where(counted, share, 0.0), mask=row_mask)
    tl.store(student_lse_ptr + rows, tl.where(counted, student_lse, 0.0), mask=row_mask)
    tl.store(teacher_lse_ptr + rows, tl.where(counted, teacher_lse, 0.0), mask=row_mask)


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
    maximum = tl.max(maxima, 0)
    return maximum + tl.log(tl.sum(sums * flushed_exp(maxima - maximum), 0))


@triton.jit
def _tile(row_ptr, cols, size, scale, policy: tl.constexpr):
    """A tile of x, -inf past the last column."""
    x = tl.load(row_ptr + cols, mask=cols < size, other=-float("inf"), eviction_policy=policy)
    return x.to(tl.float32) * scale


@triton.jit(do_not_specialize=["ignore_index"])
def _divergence_two_pass_kernel(
    student_ptr, teacher_ptr, target_ptr,
    divergence_ptr, share_ptr, student_lse_ptr, teacher_lse_ptr,
    V, stride_student, stride_teacher, ignore_index, beta, student_scale, teacher_scale,
    KIND: tl.constexpr, BLOCK_N: tl.constexpr, FOLD: tl.constexpr,
):  # fmt: skip
    # A program has one row of each. A lane is FOLD neighbours of each tile, which one thread holds;
    # lanes exchange nothing before the row's end. The first pass asks the L2 cache to keep the
    # rows, and the second goes backwards and finds them there.
    LANES: tl.constexpr = BLOCK_N // FOLD
    row = tl.program_id(0).to(tl.int64)
    student_ptr += row * stride_student
    teacher_ptr += row * stride_teacher
    counted = True
    size = V
    if target_ptr is not None:
        counted = tl.load(target_ptr + row).to(tl.int64) != ignore_index
        size = tl.where(counted, V, 0)
    student_maxima = tl.full((LANES,), LOWEST, tl.float32)
    teacher_maxima = tl.full((LANES,), LOWEST, tl.float32)
    student_sums = tl.zeros((LANES,), tl.float32)
    teacher_sums = tl.zeros((LANES,), tl.float32)
    for start in tl.range(0, size, BLOCK_N, num_stages=1):
        cols = start + tl.arange(0, BLOCK_N)
        x = _tile(student_ptr, cols, size, student_scale, "evict_last")
        y = _tile(teacher_ptr, cols, size, teacher_scale, "evict_last")
        student_maxima, student_sums = _lanes_updated(x, student_maxima, student_sums, FOLD)
        teacher_maxima, teacher_sums = _lanes_updated(y, teacher_maxima, teacher_sums, FOLD)
    student_lse = _lanes_lse(student_maxima, student_sums)
    teacher_lse = _lanes_lse(teacher_maxima, teacher_sums)

    student_shares = tl.zeros((LANES,), tl.float32)
    teacher_shares = tl.zeros((LANES,), tl.float32)
    for tile in tl.range(1, tl.cdiv(size, BLOCK_N) + 1, num_stages=1):
        cols = (tl.cdiv(size, BLOCK_N) - tile) * BLOCK_N + tl.arange(0, BLOCK_N)
        log_q = _tile(student_ptr, cols, size, student_scale, "evict_first") - student_lse
        log_p = _tile(teacher_ptr, cols, size, teacher_scale, "evict_first") - teacher_lse
        student, teacher = shares(log_p, log_q, flushed_exp(log_p), flushed_exp(log_q), beta, KIND)
        student_shares += tl.sum(tl.reshape(student, (LANES, FOLD)), 1)
        teacher_shares += tl.sum(tl.reshape(teacher, (LANES, FOLD)), 1)
    share = tl.sum(student_shares, 0)
    divergence = share + tl.sum(teacher_shares, 0)
    tl.store(divergence_ptr + row, divergence)
    tl.store(share_ptr + row, share)
    tl.store(student_lse_ptr + row, tl.where(counted, student_lse, 0.0))
    tl.store(teacher_lse_ptr + row, tl.where(counted, teacher_lse, 0.0))


@triton.jit(do_not_specialize=["M", "ignore_index"])
def _divergence_backward_kernel(
    grad_ptr, student_ptr, teacher_ptr, target_ptr,
    divergence_ptr, share_ptr, student_lse_ptr, teacher_lse_ptr, dstudent_ptr, dteacher_ptr,
    M, V, stride_grad, stride_student, stride_teacher, ignore_index,
    beta, student_scale, teacher_scale,
    KIND: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
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
    first = tl.program_id(1) * BLOCK_N
    for start in tl.range(first, V, tl.num_programs(1) * BLOCK_N, num_stages=1):
        cols = (start + tl.arange(0, BLOCK_N))[None, :]
        inside = row_mask & (cols < V)
        mask = counted & (cols < V)
        x = tl.load(student_ptr + rows * stride_student + cols, mask=mask, other=-float("inf"))
        y = tl.load(teacher_ptr + rows * stride_teacher + cols, mask=mask, other=-float("inf"))
        log_q = x.to(tl.float32) * student_scale - student_lse
        log_p = y.to(tl.float32) * teacher_scale - teacher_lse
        student, teacher = slopes(
            log_p, log_q, flushed_exp(log_p), flushed_exp(log_q), divergence, share, beta, KIND
        )
        # The gradient of an ignored token's result may be inf or NaN.
        if dstudent_ptr is not None:
            dx = tl.where(counted, grad * student * student_scale, 0.0)
            dx = dx.to(dstudent_ptr.dtype.element_ty)
            tl.store(dstudent_ptr + rows * V + cols, dx, mask=inside)
        if dteacher_ptr is not None:
            dy = tl.where(counted, grad * teacher * teacher_scale, 0.0)
            dy = dy.to(dteacher_ptr.dtype.element_ty)
            tl.store(dteacher_ptr + rows * V + cols, dy, mask=inside)


def plan_forward(logits: Tensor) -> WholeRow | Online:
    """A rule that no GPU has timed yet: a thread holds 16 elements of a whole row of each, or 16
    bytes of bfloat16 of a tile of each."""
    V = logits.shape[1]
    return plan_whole_rows(V, 1024) if V <= 8192 else Online(4096, 512)


@library.kernel("divergence_forward", "cuda")
def divergence_forward(call, divergence, student_share, student_lse, teacher_lse, plan):
    student, teacher = rows(call.student_logits), rows(call.teacher_logits)
    M, V = student.shape
    plan = plan or plan_forward(student)
    results = (flat(result) for result in (divergence, student_share, student_lse, teacher_lse))
    tensors = (student, teacher, flat(call.target), *results)
    strides = (student.stride(0), teacher.stride(0), call.ignore_index)
    kind = limit(call.kind, call.beta)
    if isinstance(plan, WholeRow):
        arguments = (*tensors, M, V, *strides, *scalars(call))
        launch_whole_rows(_divergence_kernel, plan, student, *arguments, KIND=kind)
    else:
        # A thread loads 16 bytes at once.
        fold = min(plan.BLOCK_N, 16 // student.element_size())
        launch(
            _divergence_two_pass_kernel, (M,), student,
            *tensors, V, *strides, *scalars(call),
            KIND=kind, BLOCK_N=plan.BLOCK_N, FOLD=fold, num_warps=plan.num_warps,
        )  # fmt: skip


@library.kernel("divergence_backward", "cuda")
def divergence_backward(call, dstudent_logits, dteacher_logits, plan):
    student, teacher = rows(call.student_logits), rows(call.teacher_logits)
    M, V = student.shape
    plan: SplitRows = plan or plan_backward(student)
    grad = call.ddivergence.reshape(-1)
    saved = (call.divergence, call.student_share, call.student_lse, call.teacher_lse)
    launch(
        _divergence_backward_kernel,
        (cdiv(M, plan.BLOCK_M), min(cdiv(V, plan.BLOCK_N), plan.programs)), student,
        grad, student, teacher, flat(call.target), *(flat(value) for value in saved),
        dstudent_logits, dteacher_logits,
        M, V, grad.stride(0), student.stride(0), teacher.stride(0), call.ignore_index,
        *scalars(call),
        KIND=limit(call.kind, call.beta),
        BLOCK_M=plan.BLOCK_M, BLOCK_N=plan.BLOCK_N, num_warps=plan.num_warps,
    )  # fmt: skip
