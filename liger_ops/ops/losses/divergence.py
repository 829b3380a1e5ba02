"""The divergence of two distributions that are given by their logits, and the kind "cosine", of
rows of scaled logits.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ... import autograd, library
from ...accepted import FRACTION, POSITIVE, Options
from ..tensors import widened
from .cross_entropy import log_softmax_of, logsumexp


def norm_of(x: Tensor) -> Tensor:
    """Return the norm of each row.

    It is inf for a row of zeros, whose cosine and gradient are then 0, and NaN for a row whose sum
    of squares is not finite.
    """
    squares = x.square().sum(-1)
    empty = squares == 0
    # squares - squares is 0 or, for an infinite sum, NaN.
    norm = torch.where(empty, 1.0, squares).sqrt() + (squares - squares)
    return torch.where(empty, float("inf"), norm)


def cosines(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the divergence, the cosine and both norms of each pair of rows."""
    norms = norm_of(x), norm_of(y)
    cosine = (x * y).sum(-1) / norms[0] / norms[1]
    return 1 - cosine, cosine, *norms


def cosine_slopes(x: Tensor, y: Tensor, cosine: Tensor, *norms: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of the divergence for x and y, from the cosine and both norms."""
    a, b = (row / norm.unsqueeze(-1) for row, norm in zip((x, y), norms, strict=True))
    cosine = cosine.unsqueeze(-1)
    return (cosine * a - b) / norms[0].unsqueeze(-1), (cosine * b - a) / norms[1].unsqueeze(-1)


# The kinds that compare probabilities; and, with the kind that compares logits, all kinds.
DISTRIBUTION_KINDS = ("forward_kl", "reverse_kl", "jsd", "tvd")
KINDS = (*DISTRIBUTION_KINDS, "cosine")
RESULTS = "divergence student_share student_lse teacher_lse student_lse_error teacher_lse_error"
OPTIONS: Options = {
    "kind": KINDS, "beta": FRACTION, "temperature": POSITIVE, "teacher_temperature": POSITIVE,
}  # fmt: skip

# The exponential of this number is 0 in every dtype.
LOWEST_LOGARITHM = -1e4


@library.compose
def divergence(
    student_logits: Tensor, teacher_logits: Tensor, kind: str = "jsd", beta: float = 0.5,
    temperature: float = 1.0, teacher_temperature: float | None = None,
    target: Tensor | None = None, ignore_index: int = -100,
) -> Tensor:  # fmt: skip
    """Compute the divergence of a student's distribution from its teacher's, for each token.

    With q = softmax(student_logits / temperature), p = softmax(teacher_logits /
    teacher_temperature) and m = beta * p + (1 - beta) * q, sums being over the classes:

        forward_kl: sum(p * log(p / q))
        reverse_kl: sum(q * log(q / p))
        jsd: beta * sum(p * log(p / m)) + (1 - beta) * sum(q * log(q / m))
        tvd: sum(|p - q|) / 2
        cosine: 1 - sum(x * y) / (|x| * |y|), with the logits x of the student, y of the teacher

    A token whose target is ignore_index gives 0. The Jensen-Shannon divergence would be 0 for a
    beta of 0 or 1; as in Liger-Kernel, it is then forward_kl or reverse_kl, its limit after
    division by beta or by 1 - beta.

    The result is computed and returned in float32, whatever the dtype of the logits; autocast
    changes nothing. The logits are never written, widened or normalised in memory: beside the
    result, five numbers per token are stored. The forward reads both rows once if they fit on chip
    (up to 4096 classes on a GPU) or the kind is "cosine", else twice: online for both lse, and for
    the divergence. The backward reads them once and writes the gradients that are required. The
    logits of ignored tokens are not read on a GPU. float64 runs the definition on every device.

    Both logits are differentiable. Their gradients are computed in float32 and rounded once. An
    ignored token has gradients of exactly 0, whatever its logits are.

    A class of -inf has probability 0, and so has a class whose probability is too small for
    float32. It adds 0 to a sum that has this probability as a factor. A class with probability 0
    for the student alone makes forward_kl inf, and for the teacher alone reverse_kl; jsd and tvd
    are finite. An infinite forward_kl has a finite gradient for the student, q - p, and an infinite
    reverse_kl has a finite gradient for the teacher; the other gradient is then infinite or NaN. A
    row that is all -inf, or that contains inf or NaN, gives NaN.

    For "cosine", a row of zeros has the cosine 0 and a gradient of 0, and a row whose sum of
    squares is not finite in float32 gives NaN. A temperature changes nothing.

    This op calls `divergence_forward`.

    Args:
        student_logits: (..., V), floating point, any strides; unit stride in the last dimension is
            fast.
        teacher_logits: of the same shape, floating point, possibly of another dtype.
        kind: "forward_kl", "reverse_kl", "jsd", "tvd" or "cosine".
        beta: the teacher's weight in m, from 0 to 1; only used by "jsd".
        temperature: of the student, above 0. The gradient has its factor 1 / temperature; the
            result is not multiplied by the square of the temperature.
        teacher_temperature: above 0, or None for the student's.
        target: (...), int64 or int32, or None. It is only compared with ignore_index.
        ignore_index: the target of tokens that do not count.

    Returns:
        (...), float32, or float64 if the logits of either are.

    Raises:
        TypeError: the logits are not floating point, or target is not int64 or int32.
        ValueError: the logits have different shapes or no class, target does not have the shape
            of the tokens, the devices differ, or an option is outside its range or unknown.

    Source: Lin, "Divergence measures based on the Shannon entropy", 1991; Agarwal et al.,
        "On-policy distillation of language models", 2024.

    Example:
        >>> student, teacher = torch.zeros(1, 2), torch.tensor([[0.0, -torch.inf]])
        >>> liger_ops.divergence(student, teacher, "forward_kl")
        tensor([0.6931])
    """
    options = (kind, beta, temperature, teacher_temperature, ignore_index)
    return divergence_forward(student_logits, teacher_logits, target, *options)[0]


@library.forward(
    "student_logits teacher_logits target ... known_student_lse known_teacher_lse "
    "known_student_lse_error known_teacher_lse_error",
    tags=torch.Tag.needs_fixed_stride_order,
    returns=RESULTS,
    axes="student_logits=* V, teacher_logits=* V, target=*: int, known_student_lse=*, "
    "known_teacher_lse=*, known_student_lse_error=*, known_teacher_lse_error=* -> divergence=*, "
    "student_share=*, student_lse=*, teacher_lse=*, student_lse_error=*, teacher_lse_error=*",
    dtype="float32+student_logits+teacher_logits",
    options=OPTIONS,
)
def divergence_forward(call: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute `divergence`, and the statistics of each token that its backward needs.

    A vocabulary may be split, for example over devices. The logits are then those of a part of the
    classes, and lse of all classes is given for student and teacher. The result is the part's share
    of the divergence: the sum over the parts is the divergence. The op then reads the logits once,
    and has no gradient; `divergence_backward` of a part takes the sums over all parts.

    Args:
        known_student_lse, known_teacher_lse, known_student_lse_error, known_teacher_lse_error:
            (...), float32, or float64 if the results are: lse and lse_error over all classes, of
            the student and of the teacher. None for all four if the logits have all classes, and
            for "cosine".

    Returns:
        divergence: the result of `divergence`, the only differentiable one.
        student_share: the part of the divergence that is a mean over q: for jsd
            (1 - beta) * sum(q * log(q / m)), for tvd sum(q * sign(q - p)) / 2, for reverse_kl the
            whole divergence, and for forward_kl 0. For cosine it is the cosine.
        student_lse, teacher_lse: log(sum(exp(logits / temperature))), or the given values. For
            cosine they are the norms of logits / temperature, and inf for a row of zeros.
        student_lse_error, teacher_lse_error: the rounding errors of lse, as the lse_error of
            `cross_entropy_forward`, or the given values. For cosine they are 0.
        All are of the same shape and dtype, and 0 for an ignored token.

    Raises:
        TypeError, ValueError: as `divergence`; or some of the four known values are given without
            the others, or with "cosine", or with a tensor that requires a gradient.

    Example:
        >>> liger_ops.divergence_forward(torch.zeros(1, 4), torch.zeros(1, 4))[2]
        tensor([1.3863])
    """
    x, y, within = _scaled_logits(call)
    if call.kind == "cosine":
        value, student_share, *lses = cosines(x, y)
        errors = [torch.zeros_like(value) for _ in lses]
    else:
        known = (
            (call.known_student_lse, call.known_student_lse_error),
            (call.known_teacher_lse, call.known_teacher_lse_error),
        )
        pairs = [_lse(z, *known_pair) for z, known_pair in zip((x, y), known, strict=True)]
        log_q, log_p = (log_softmax_of(z, *lse) for z, lse in zip((x, y), pairs, strict=True))
        lses, errors = map(list, zip(*pairs, strict=True))
        student, teacher = shares(log_p, log_q, limit(call.kind, call.beta), call.beta)
        student_share = student.sum(-1)
        value = student_share + teacher.sum(-1)
    results = [value]
    for other in (student_share, *lses, *errors):
        results.append(other.detach().to(value.dtype))
    if within is not None:
        results = [torch.where(within, result, 0.0) for result in results]
    return tuple(results)  # type: ignore[return-value]


class _DivergenceFormula(autograd.Formula):
    def setup_context(self, ctx: Any, call: Any, output: Any) -> None:
        if call.known_student_lse is not None and any(ctx.needs_input_grad):
            raise ValueError(
                "divergence_forward: no argument may require a gradient where known_student_lse is"
                " given"
            )
        super().setup_context(ctx, call, output)


@library.backward(
    "divergence_forward",
    "ddivergence student_logits teacher_logits target divergence student_share student_lse"
    " teacher_lse student_lse_error teacher_lse_error ... output_mask -> dstudent_logits"
    " dteacher_logits",
    formula=_DivergenceFormula,
)
def divergence_backward(call: Any) -> Any:
    """Compute the gradients of `divergence`. With s the student_share:

        dstudent_c = dy / temperature * slope_c
        forward_kl: slope_c = q_c - p_c
        reverse_kl: slope_c = q_c * (log(q_c / p_c) - s)
        jsd: slope_c = q_c * ((1 - beta) * log(q_c / m_c) - s)
        tvd: slope_c = q_c * (sign(q_c - p_c) / 2 - s)
        cosine: slope_c = (s * x_c / |x| - y_c / |y|) / |x|

    and likewise for the teacher, with divergence - s in place of s, except for cosine. The values
    of the forward's results are used: the logits may be those of a part of the classes, and the
    results those of all. The definition computes the results again only for their derivatives.
    """
    x, y, within = _scaled_logits(call)
    if call.kind == "cosine":
        _, *computed = cosines(x, y)
        known = (call.student_share, call.student_lse, call.teacher_lse)
        slopes = cosine_slopes(x, y, *map(with_derivative, known, computed))
    else:
        errors = (call.student_lse_error, call.teacher_lse_error)
        rows = zip((x, y), (call.student_lse, call.teacher_lse), errors, strict=True)
        log_q, log_p = (log_softmax_of(z, *_lse_with_derivative(z, *lse)) for z, *lse in rows)
        slopes = _slopes(log_p, log_q, call)
    gradients: list[Tensor | None] = []
    logits = (call.student_logits, call.teacher_logits)
    for wanted, slope, given_logits, divisor in zip(
        call.output_mask, slopes, logits, _temperatures(call), strict=True
    ):
        dlogits = None
        if wanted:
            dlogits = call.ddivergence.to(slope.dtype).unsqueeze(-1) * slope * (1 / divisor)
            if within is not None:
                dlogits = torch.where(within.unsqueeze(-1), dlogits, 0.0)
            dlogits = dlogits.to(given_logits.dtype).contiguous()
        gradients.append(dlogits)
    return tuple(gradients)


def limit(kind: str, beta: float) -> str:
    """Return the kind; for jsd with a beta of 0 or 1, the kind that is its limit."""
    if kind == "jsd" and beta in (0, 1):
        return "reverse_kl" if beta else "forward_kl"
    return kind


def _temperatures(call: Any) -> tuple[float, float]:
    """Return the temperatures of the student and of the teacher."""
    return call.temperature, call.teacher_temperature or call.temperature


def _scaled_logits(call: Any) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return both logits / temperature, and whether each token counts.

    The logits of an ignored token are replaced by 0: they may be NaN, which would make the gradient
    NaN.
    """
    within = None if call.target is None else call.target != call.ignore_index
    both_scaled = []
    for logits, temperature in zip(
        (call.student_logits, call.teacher_logits), _temperatures(call), strict=True
    ):
        kept = logits if within is None else torch.where(within.unsqueeze(-1), logits, 0.0)
        both_scaled.append(widened(kept) * (1 / temperature))
    return both_scaled[0], both_scaled[1], within


def shares(log_p: Tensor, log_q: Tensor, kind: str, beta: float) -> tuple[Tensor, Tensor]:
    """Return each class's term that has the factor q, and the term that has the factor p.

    They are the student's and the teacher's share of the divergence. Each is 0 where its factor is
    0, although the factor's logarithm is -inf.
    """
    p, q = log_p.exp(), log_q.exp()
    if kind == "tvd":
        half = torch.sign(q - p).detach() / 2
        return q * half, -p * half
    if kind == "forward_kl":
        return torch.zeros_like(q), p * torch.where(p == 0, 0.0, log_p - log_q)
    if kind == "reverse_kl":
        return q * torch.where(q == 0, 0.0, log_q - log_p), torch.zeros_like(p)
    # The gradient of logaddexp is NaN where both arguments are -inf.
    log_p, log_q = log_p.clamp(min=LOWEST_LOGARITHM), log_q.clamp(min=LOWEST_LOGARITHM)
    log_m = torch.logaddexp(log_p + math.log(beta), log_q + math.log(1 - beta))
    return (1 - beta) * q * (log_q - log_m), beta * p * (log_p - log_m)


def with_derivative(known: Tensor | None, computed: Tensor) -> Tensor:
    """Return `known`, with the derivatives of `computed`.

    `computed` may be over a part of the classes, where the known value is over all.
    """
    if known is None:
        return computed
    # In a part of the classes all may have probability 0, and an lse of -inf: -inf - -inf is NaN.
    derivative = torch.where(computed.isfinite(), computed - computed.detach(), 0.0)
    return known.detach() + derivative


def _lse(x: Tensor, known: Tensor | None, known_error: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return lse and its error: the known values, or those of x."""
    if known is None or known_error is None:
        return logsumexp(x)
    # An op may not return its arguments: the results are copies.
    return known.clone(), known_error.clone()


def _lse_with_derivative(
    x: Tensor, known: Tensor | None, known_error: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return lse and its error, as `_lse` does, with the derivatives of the lse of x."""
    lse, error = logsumexp(x)
    return with_derivative(known, lse), error if known_error is None else known_error


def _slopes(log_p: Tensor, log_q: Tensor, call: Any) -> tuple[Tensor, Tensor]:
    """Return the gradients for the student's and the teacher's logits / temperature."""
    kind, share = limit(call.kind, call.beta), call.student_share
    student, teacher = shares(log_p, log_q, kind, call.beta)
    p, q = log_p.exp(), log_q.exp()
    teacher_share = None if share is None else call.divergence - share
    of_student = with_derivative(share, student.sum(-1)).unsqueeze(-1)
    of_teacher = with_derivative(teacher_share, teacher.sum(-1)).unsqueeze(-1)
    return (
        q - p if kind == "forward_kl" else student - q * of_student,
        p - q if kind == "reverse_kl" else teacher - p * of_teacher,
    )
