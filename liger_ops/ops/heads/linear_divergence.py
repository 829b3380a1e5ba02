"""The divergence of two linear layers' distributions, mixed with the cross-entropy of labels; the
logits are computed in chunks and not kept."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ... import library
from ...accepted import ABOVE_0, FINITE_AT_LEAST_0, POSITIVE, Options
from ..losses.cross_entropy import REDUCTIONS
from ..losses.divergence import OPTIONS as DIVERGENCE
from .gradients import gradients_of_definition
from .head import (
    GRADIENTS,
    cast_as_linear,
    finished_in_forward,
    first_given,
    needed_gradients,
    shaped,
    still_missing,
)
from .lora import lora_input
from .precomputed_gradient import PrecomputedFormula, gradients_are_private
from .two_heads import (
    chunks_of_logits,
    divisor,
    dlogits_of,
    entropy_of,
    mixed,
    reduced,
    result_dtype,
    token_weights,
    upstream_of_sum,
    upstream_of_tokens,
    values_of,
    weights_and_items,
)

RESULTS = "loss divergence cross_entropy statistics"
# The rows of statistics: the 6 results of `divergence_forward`, then lse and lse_error of the
# student's logits at temperature 1.
STATISTICS = 8


OPTIONS: Options = {
    **DIVERGENCE, "reduction": REDUCTIONS, "chunk_bytes": ABOVE_0,
    **dict.fromkeys(("soft_weight", "hard_weight"), FINITE_AT_LEAST_0),
    "student_softcap": POSITIVE, "teacher_softcap": POSITIVE,
    "student_logit_scale": POSITIVE, "teacher_logit_scale": POSITIVE,
}  # fmt: skip
_STUDENT = (
    "student_x=* D, student_weight=V D: student_x, student_bias=V: student_x, "
    "student_lora_x=* R: student_x, student_lora_b=V R: student_x, target=*: int, "
    "token_weight=*, num_items_in_batch=: number"
)
_TEACHER = (
    "teacher_x=* E, teacher_weight=W E: teacher_x, teacher_bias=W: teacher_x, "
    "teacher_lora_x=* S: teacher_x, teacher_lora_b=W S: teacher_x"
)
_RESULTS = (
    f"loss=[*], divergence=[*], cross_entropy=[*], statistics={STATISTICS} *, "
    "dx=* D, dweight=V D, dbias=V, dlora_x=* R, dlora_b=V R, entropy=*"
)
# The teacher is given by its head, or by its logits.
AXES = f"{_STUDENT}, {_TEACHER} -> {_RESULTS} | {_STUDENT}, teacher_logits=* W -> {_RESULTS}"


@library.compose
def linear_divergence(
    student_x: Tensor, student_weight: Tensor,
    teacher_x: Tensor | None = None, teacher_weight: Tensor | None = None,
    student_bias: Tensor | None = None, teacher_bias: Tensor | None = None,
    teacher_logits: Tensor | None = None, target: Tensor | None = None,
    token_weight: Tensor | None = None, num_items_in_batch: Tensor | None = None,
    kind: str = "jsd", beta: float = 0.5,
    temperature: float = 1.0, teacher_temperature: float | None = None,
    student_softcap: float | None = None, teacher_softcap: float | None = None,
    student_logit_scale: float = 1.0, teacher_logit_scale: float = 1.0,
    soft_weight: float = 1.0, hard_weight: float = 0.0,
    ignore_index: int = -100, reduction: str = "mean",
    accum_dtype: torch.dtype | None = None, chunk_bytes: int | None = None,
    student_lora_a: Tensor | None = None, student_lora_b: Tensor | None = None,
    student_lora_scale: float = 1.0,
    teacher_lora_a: Tensor | None = None, teacher_lora_b: Tensor | None = None,
    teacher_lora_scale: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Compute the divergence of a student's head from its teacher's, mixed with cross-entropy.

        student = student_x @ student_weight.T + student_bias
        teacher = teacher_x @ teacher_weight.T + teacher_bias, or teacher_logits
        z = softcap * tanh(logits * logit_scale / softcap), or logits * logit_scale without softcap
        divergence_i = divergence(z_student, z_teacher, kind, beta, temperature, ...)
        cross_entropy_i = logsumexp(z_student) - z_student[target_i]
        loss = soft_weight * divergence + hard_weight * cross_entropy

    with the equations of `divergence`. The cross-entropy is that of the student's logits at
    temperature 1, as in Liger-Kernel's distillation losses. The divergence and the cross-entropy
    are reduced in the same way, with the weights of the tokens w_i:

        none: w_i * value_i
        sum: sum_i w_i * value_i
        mean: sum_i w_i * value_i / sum_i w_i, or / num_items_in_batch

    w_i is token_weight_i, or 1 without token_weight, and 0 for a token whose target is
    ignore_index. A mean whose w_i are all 0 is 0. A term of loss whose weight is 0 is left out.

    The teacher is a constant. A tensor of the teacher that requires a gradient is refused, so that
    no gradient is lost silently: pass `teacher_x.detach()`.

    The vocabularies may have different lengths. A class that one side lacks has probability 0 on
    that side: forward_kl is inf if the teacher has more classes, and reverse_kl if the student has
    more; jsd and tvd are finite. For cosine, the logit on that side is 0.

    The logits of one chunk of tokens at a time are computed in the dtype of x, and the loss from
    them in float32. If a gradient is needed and the reduction is "mean" or "sum", the forward
    computes it: the gradient of a chunk's logits overwrites them, and forward and backward together
    take three products of M tokens, V classes and D columns for the student, and one for the
    teacher. The backward then multiplies the gradients by the loss's own gradient and the
    reduction's factor. The gradients of student_weight and student_lora_b are summed in accum_dtype
    as in `linear_cross_entropy`.

    The backward computes the logits of both heads again, with two products more, if divergence or
    cross_entropy is differentiated itself, for the reduction "none", and for a second derivative.
    As in `linear_log_prob`, it takes all tokens and a part of the words at a time: for every kind,
    the forward keeps the sums over all words that a token needs. A part of the words gives complete
    rows of the gradient of student_weight, which are rounded once, and the gradient of student_x is
    summed in accum_dtype. If student_weight and student_bias are frozen, and in the definition, the
    backward takes a part of the tokens at a time.

    Memory, beside the results and the gradients: one chunk of logits of the student and one of the
    teacher, of at most chunk_bytes together or one row or column of each, eight float32 numbers per
    token, and the accum_dtype sum of the gradient of student_weight, or of student_x. The
    definition, which runs on a CPU and for float64, holds several float32 copies of the chunk. The
    number of chunks changes only the rounding of the result.

    Ignored tokens have results and a gradient of student_x of exactly 0, whatever their logits are.
    The matrix products compute their logits: the host sets the sizes of products, and would have to
    wait for the device to know the targets. A GPU does not read these logits afterwards. To skip
    the products too, select the tokens that count before the call, which in eager mode waits for
    the device:

        counts = target != ignore_index
        linear_divergence(student_x[counts], student_weight, teacher_x[counts], teacher_weight,
                          target=target[counts])

    With student_lora_a and student_lora_b, the student's weight is
    student_weight + student_lora_scale * student_lora_b @ student_lora_a, which is never formed:
    see `linear_cross_entropy`. student_lora_a, student_lora_b and student_x have gradients, and a
    frozen student_weight has none. A LoRA of the teacher is as constant as its head.

    Under autocast x, weight, bias, lora_a and lora_b of both are cast as
    `torch.nn.functional.linear` casts them.

    This op calls `linear_divergence_forward`.

    Args:
        student_x: (..., D), floating point, any strides.
        student_weight: (V, D), of student_x's dtype.
        teacher_x: (..., E), floating point, any strides, with the tokens of student_x.
        teacher_weight: (W, E), of teacher_x's dtype.
        student_bias: (V,), of student_x's dtype.
        teacher_bias: (W,), of teacher_x's dtype.
        teacher_logits: (..., W), floating point, in place of teacher_x, teacher_weight and
            teacher_bias.
        target: (...), int64 or int32; each is ignore_index, or from 0 to V - 1. Without it every
            token counts, and cross_entropy is None.
        token_weight: (...), floating point, or None.
        num_items_in_batch: (), the divisor of the mean, or None.
        kind: "forward_kl", "reverse_kl", "jsd", "tvd" or "cosine".
        beta: the teacher's weight in m, from 0 to 1; only used by "jsd".
        temperature: of the student, above 0. The result is not multiplied by its square.
        teacher_temperature: above 0, or None for the student's.
        student_softcap, teacher_softcap: above 0, or None for no cap.
        student_logit_scale, teacher_logit_scale: above 0.
        soft_weight, hard_weight: of divergence and of cross_entropy in loss, at least 0. A
            hard_weight above 0 needs a target.
        ignore_index: the target of tokens that do not count.
        reduction: "none", "mean" or "sum".
        accum_dtype: float32, student_weight's dtype to halve the memory of the sum of its gradient,
            or None for float32.
        chunk_bytes: the size of a chunk of both logits. None takes LIGER_OPS_LOGITS_BYTES from the
            environment or, if that is not set, what `linear_cross_entropy` takes, and 384 MiB for
            parts of the words.
        student_lora_a, student_lora_b: (R, D) and (V, R), floating point: a LoRA that is added to
            student_weight. Both, or neither.
        teacher_lora_a, teacher_lora_b: (S, E) and (W, S), the same of teacher_weight.
        student_lora_scale, teacher_lora_scale: the factors of lora_b @ lora_a.

    Returns:
        loss, divergence, cross_entropy: each (), or (...) for the reduction "none"; float32, or
            float64 if a tensor of the student or teacher is. All are differentiable.

    Raises:
        TypeError: a tensor of a head, teacher_logits or token_weight is not floating point, weight
            or bias of a head does not have the dtype of its x, target is not int64 or int32, or
            num_items_in_batch is bool or complex.
        ValueError: the shapes do not fit together; neither or both of a teacher's head and
            teacher_logits are given; one of a lora_a and a lora_b is given without the other;
            hard_weight is not 0 without a target; num_items_in_batch is given with another
            reduction than "mean"; an option is outside its range or unknown; accum_dtype is neither
            float32 nor student_weight's dtype; the devices differ; or a tensor of the teacher,
            token_weight or num_items_in_batch requires a gradient.
        IndexError: a target is out of range, on a CPU; other devices do as in `cross_entropy`.

    Source: Hinton et al., "Distilling the knowledge in a neural network", 2015; Agarwal et al.,
        "On-policy distillation of language models", 2024.

    Example:
        >>> x, student, teacher = torch.zeros(2, 8), torch.zeros(2, 8), torch.zeros(4, 8)
        >>> liger_ops.linear_divergence(x, student, x, teacher, target=torch.tensor([1, -100]))[1:]
        (tensor(0.2158), tensor(0.6931))
    """
    op = "linear_divergence"
    student_x, student_weight, student_bias = cast_as_linear(
        student_x, student_weight, student_bias
    )
    lora = (student_lora_a, student_lora_b, student_lora_scale)
    lora_x, lora_b = lora_input(op, student_x, student_weight, *lora, "student_")
    teacher_lora_x = None
    if teacher_x is not None and teacher_weight is not None:
        teacher_x, teacher_weight, teacher_bias = cast_as_linear(
            teacher_x, teacher_weight, teacher_bias
        )
        lora = (teacher_lora_a, teacher_lora_b, teacher_lora_scale)
        teacher_lora_x, teacher_lora_b = lora_input(
            op, teacher_x, teacher_weight, *lora, "teacher_"
        )
    elif teacher_lora_a is not None or teacher_lora_b is not None:
        raise ValueError(
            f"{op}: teacher_lora_a and teacher_lora_b must be None without teacher_x and"
            " teacher_weight, got a tensor"
        )
    head = (student_x, student_weight, student_bias, lora_x, lora_b)
    mask = needed_gradients(head, reduction)
    with gradients_are_private():
        return linear_divergence_forward(
            student_x, student_weight, teacher_x, teacher_weight, student_bias, teacher_bias,
            teacher_logits, target, token_weight, num_items_in_batch,
            kind, beta, temperature, teacher_temperature, student_softcap, teacher_softcap,
            student_logit_scale, teacher_logit_scale, soft_weight, hard_weight,
            ignore_index, reduction, accum_dtype, chunk_bytes, False, mask,
            lora_x, lora_b, teacher_lora_x, teacher_lora_b,
        )[:3]  # fmt: skip


@library.forward(
    "... -student_lora_a -student_lora_scale -teacher_lora_a -teacher_lora_scale "
    "return_entropy gradient_mask student_lora_x student_lora_b teacher_lora_x teacher_lora_b",
    returns=f"{RESULTS} {GRADIENTS} entropy",
    axes=AXES,
    dtype="float32+student_x+teacher_x+teacher_logits",
    options=OPTIONS,
)
def linear_divergence_forward(
    call: Any,
) -> tuple[
    Tensor, Tensor, Tensor | None, Tensor,
    Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None,
]:  # fmt: skip
    """Compute `linear_divergence`, its statistics and gradients, and the student's entropy.

    The statistics are each token's values that the backward needs. The entropy is computed on
    request, and takes one more pass over a chunk of the student's logits.

    The gradients that gradient_mask asks for are those of the sum of the tokens' losses, in
    student_x's dtype; for float16 in float32, and those of student_weight and student_lora_b in
    accum_dtype. The backward uses them if loss is the only result with a gradient, and otherwise
    computes the logits again. Autocast changes nothing here.

    Args:
        return_entropy: whether to compute entropy.
        gradient_mask: whether to compute dx, dweight, dbias, dlora_x and dlora_b. All False for the
            reduction "none".
        student_lora_x, student_lora_b: (..., R) and (V, R), of student_x's dtype, whose product is
            added to the student's logits. Both, or neither.
        teacher_lora_x, teacher_lora_b: (..., S) and (W, S), the same for the teacher.

    Returns:
        loss, divergence, cross_entropy: the results of `linear_divergence`.
        statistics: (8, ...); for each token the results of `divergence_forward`, and lse and
            lse_error of the student's logits at temperature 1, which are 0 without a target. All
            are 0 for an ignored token. Not differentiable.
        dx, dweight, dbias, dlora_x, dlora_b: contiguous, of the shapes of student_x,
            student_weight, student_bias, student_lora_x and student_lora_b; each is None unless
            gradient_mask asks for it.
        entropy: (...), the entropy of softmax(z_student / temperature), as in `log_prob`; 0 for an
            ignored token, not differentiable, and None unless return_entropy.

    Raises:
        TypeError, ValueError, IndexError: as `linear_divergence`; or gradient_mask asks for a
            gradient with the reduction "none", or for the gradient of a tensor that is None.

    Example:
        >>> x, weight = torch.zeros(1, 8), torch.zeros(4, 8)
        >>> liger_ops.linear_divergence_forward(x, weight, x, weight)[3][2]  # the student's lse
        tensor([1.3863])
    """
    weights, items = weights_and_items(call, result_dtype(call))
    gradients = gradients_of_definition(
        call.student_weight, call.gradient_mask, call.accum_dtype, in_forward=True
    )
    divergences, losses, statistics, entropies = [], [], [], []
    for chunk, part, student, teacher, targets in chunks_of_logits(call):
        value, loss, chunk_statistics = values_of(call, student, teacher, targets)
        divergences.append(value.to(weights.dtype))
        if loss is not None:
            losses.append(loss.to(weights.dtype))
        statistics.append(chunk_statistics.to(weights.dtype))
        if call.return_entropy:
            entropies.append(entropy_of(call, student, targets).to(weights.dtype))
        if any(call.gradient_mask):
            with torch.no_grad():
                upstream = upstream_of_sum(call, weights[chunk])
                gradients.add(part, dlogits_of(call, upstream, student, teacher, targets))
    divergence, cross_entropy = reduced(call, torch.cat(divergences), weights, items), None
    if losses:
        cross_entropy = reduced(call, torch.cat(losses), weights, items)
    shape = call.student_x.shape[:-1]
    return (
        mixed(call, divergence, cross_entropy),
        divergence,
        cross_entropy,
        torch.cat(statistics, 1).reshape(STATISTICS, *shape),
        *shaped(gradients.results(), call),
        torch.cat(entropies).reshape(shape) if entropies else None,
    )  # type: ignore[return-value]


class _LinearDivergenceFormula(PrecomputedFormula):
    def items(self, call: Any) -> Tensor | int:
        # Weights that are DTensors keep the shape of the tokens.
        return divisor(call, token_weights(call, call.statistics.dtype))

    def refusal(self, name: str) -> str:
        if not name.startswith("teacher_"):
            return super().refusal(name)
        # The user's argument is lora_a, from which lora_x is computed.
        name = name.replace("lora_x", "lora_a")
        reason = f"as the teacher is a constant; pass {name}.detach()"
        return f"{name} must not require a gradient, {reason}"


@library.backward(
    "linear_divergence_forward",
    "dloss? ddivergence? dcross_entropy? student_x student_weight teacher_x teacher_weight"
    " student_bias teacher_bias teacher_logits target token_weight num_items_in_batch"
    " statistics dx? dweight? dbias? ... output_mask student_lora_x= student_lora_b="
    " teacher_lora_x= teacher_lora_b= dlora_x= dlora_b= -> dx dweight dbias dlora_x"
    " dlora_b",
    returns=GRADIENTS,
    formula=_LinearDivergenceFormula,
)
def linear_divergence_backward(call: Any) -> Any:
    """Compute the gradient of `linear_divergence_forward`.

    A gradient that the forward computed, and that is an argument here, is multiplied by dloss and
    the reduction's factor, in float32, and rounded once. The others are computed from recomputed
    logits: by the definition a chunk of tokens at a time, by kernels a chunk of words, whose
    gradients of student_weight, student_bias and student_lora_b are complete. With q_i the softmax
    of z_i at temperature 1:

        dz_ic = soft_i * dstudent_ic of `divergence_backward` + hard_i * (q_ic - (c == target_i))
        dlogits_ic = dz_ic * logit_scale * (1 - (z_ic / softcap)**2), in student_x's dtype
        dx = dlogits @ weight
        dweight = sum over the chunks of dlogits.T @ x
        dbias = sum(dlogits, 0)
        dlora_x = dlogits @ lora_b
        dlora_b = sum over the chunks of dlogits.T @ lora_x

    where soft_i and hard_i are the gradients of the token's divergence and cross-entropy.
    """
    weights, items = weights_and_items(call, call.statistics.dtype)
    finished = finished_in_forward(call, items)
    missing = still_missing(call.output_mask, finished)
    if not any(missing):
        return tuple(finished)
    upstream = upstream_of_tokens(call, weights, items)
    gradients = gradients_of_definition(call.student_weight, missing, call.accum_dtype)
    for chunk, part, student, teacher, targets in chunks_of_logits(call):
        of_chunk = [None if grad is None else grad[chunk] for grad in upstream]
        gradients.add(part, dlogits_of(call, of_chunk, student, teacher, targets))
    return first_given(finished, shaped(gradients.results(), call))


library.keep_dtypes_under_autocast("linear_divergence_forward", "linear_divergence_backward")
