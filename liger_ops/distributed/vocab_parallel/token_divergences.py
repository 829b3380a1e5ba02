"""The divergence of each token's two distributions, over a sharded vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import pad

from ...ops.losses.cosine import norm_of
from ...ops.losses.divergence import divergence_backward, divergence_forward
from .collectives import gathered, of_each_rank
from .derivatives import once
from .token_statistics import rank_lses

# The kinds whose summands are of a mean of both distributions, or of their difference: no rank can
# compute its own before it knows both lse.
_AFTER_LSE = ("jsd", "tvd")


class Options(NamedTuple):
    """Those of the op; `kind` is what jsd is at the ends of beta."""

    kind: str
    beta: float
    temperature: float
    teacher_temperature: float
    ignore_index: int


class Found(NamedTuple):
    """The results of `divergence_forward` for all words, no two of which share memory."""

    divergence: Tensor
    student_share: Tensor
    student_lse: Tensor
    teacher_lse: Tensor
    student_lse_error: Tensor
    teacher_lse_error: Tensor


class TokenDivergences(Function):
    """The divergence of logits, by one all-gather of five numbers a token, for jsd and tvd by two
    of four and of two, and for cosine by one of three. The result is the same on every rank, to the
    last bit, and its gradient has to be the same too. The backward computes the gradients of the
    rank's logits by the op's own backward."""

    @staticmethod
    def forward(
        ctx: Any, student: Tensor, teacher: Tensor, target: Tensor | None,
        group: str, options: Options,
    ) -> Tensor:  # fmt: skip
        local = local_statistics(student, teacher, target, options)
        ranks = gathered(local, 0, group)
        found = of_all_ranks(ranks, student, teacher, target, group, options)
        ctx.save_for_backward(student, teacher, target, *found)
        ctx.options = options
        return found.divergence

    @staticmethod
    @once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        student, teacher, target, *found = ctx.saved_tensors
        wanted = list(ctx.needs_input_grad[:2])
        grads = gradients(grad, student, teacher, target, Found(*found), ctx.options, wanted)
        return (*grads, None, None, None)


def with_a_word(logits: Tensor, kind: str) -> Tensor:
    """The logits of a rank that has no words, with one that adds nothing to any sum: the op needs a
    word."""
    if logits.shape[-1]:
        return logits
    return pad(logits, (0, 1), value=0.0 if kind == "cosine" else float("-inf"))


def local_statistics(
    student: Tensor, teacher: Tensor, target: Tensor | None, options: Options
) -> Tensor:
    """(4 or 5, ...): both lse of the rank's words and both errors, and for a kind that has sums of
    these words alone, the divergence. For cosine they are both norms and the cosine."""
    kind = options.kind
    if kind in _AFTER_LSE:
        options = options._replace(kind="forward_kl")
    logits = [with_a_word(logits, kind) for logits in (student, teacher)]
    given: tuple[Any, ...] = (*logits, target, *options)
    divergence, share, *both = divergence_forward(*given)
    if kind in _AFTER_LSE:
        return torch.stack(both)
    return torch.stack([*both[:2], share] if kind == "cosine" else [*both, divergence])


def of_all_ranks(
    gathered_ranks: Tensor, student: Tensor, teacher: Tensor, target: Tensor | None,
    group: str, options: Options,
) -> Found:  # fmt: skip
    """The statistics of all words, from the gathered ones of the ranks and, for jsd and tvd, the
    rank's logits."""
    kind = options.kind
    count = {"cosine": 3, **dict.fromkeys(_AFTER_LSE, 4)}.get(kind, 5)
    ranks = of_each_rank(gathered_ranks, count).unbind(1)
    if kind == "cosine":
        found = _cosines(ranks)
    elif kind in _AFTER_LSE:
        (student_lse, student_error, _), (teacher_lse, teacher_error, _) = _both(ranks)
        both = (student_lse, teacher_lse, student_error, teacher_error)
        logits = [with_a_word(logits, kind) for logits in (student, teacher)]
        given: tuple[Any, ...] = (*logits, target, *options, *both)
        divergence, share, *_ = divergence_forward(*given)
        sums = of_each_rank(gathered(torch.stack([divergence, share]), 0, group), 2)
        found = Found(sums[:, 0].sum(0), sums[:, 1].sum(0), *both)
    else:
        found = _relative_entropies(ranks, kind)
    if target is None:
        return found
    return Found(*(value.masked_fill(target == options.ignore_index, 0.0) for value in found))


def _relative_entropies(ranks: Sequence[Tensor], kind: str) -> Found:
    """By the chain rule: with P_r and Q_r the probabilities of the words of rank r, forward_kl is
    sum_r P_r * (divergence_r + log(P_r / Q_r)); reverse_kl has P and Q in each other's place."""
    divergences = ranks[4]
    (student_lse, student_error, log_Q), (teacher_lse, teacher_error, log_P) = _both(ranks)
    log_w, log_other = (log_Q, log_P) if kind == "reverse_kl" else (log_P, log_Q)
    w = torch.exp(log_w)
    # If a side has none of the rank's words, divergence_r is NaN, and log(P_r / Q_r) infinite.
    divergences = torch.where(log_other == float("-inf"), 0.0, divergences)
    terms = torch.where(w == 0, 0.0, w * (divergences + log_w - log_other))
    divergence = terms.sum(0)
    share = divergence.clone() if kind == "reverse_kl" else torch.zeros_like(divergence)
    return Found(divergence, share, student_lse, teacher_lse, student_error, teacher_error)


def _both(ranks: Sequence[Tensor]) -> list[tuple[Tensor, Tensor, Tensor]]:
    """`rank_lses` of the student and of the teacher."""
    return [rank_lses(ranks[side], ranks[2 + side]) for side in range(2)]


def _cosines(ranks: Sequence[Tensor]) -> Found:
    """The norm of a rank's part is inf if the part is 0."""
    student_norms, teacher_norms, cosines = ranks
    parts = [n.masked_fill(n == float("inf"), 0.0) for n in (student_norms, teacher_norms)]
    norms = [norm_of(n.movedim(0, -1)) for n in parts]
    cosine = (cosines * (parts[0] / norms[0]) * (parts[1] / norms[1])).sum(0)
    return Found(1 - cosine, cosine, *norms, *(torch.zeros_like(cosine) for _ in norms))


def gradients(
    grad: Tensor, student: Tensor, teacher: Tensor, target: Tensor | None, found: Found,
    options: Options, wanted: list[bool],
) -> list[Tensor | None]:  # fmt: skip
    """The gradients of the rank's logits, from that of each token's divergence."""
    words, kind = student.shape[-1], options.kind
    logits = [with_a_word(logits, kind) for logits in (student, teacher)]
    given: tuple[Any, ...] = (grad, *logits, target, *found, *options, wanted)
    grads = divergence_backward(*given)
    return [None if grad is None else grad[..., :words] for grad in grads]
