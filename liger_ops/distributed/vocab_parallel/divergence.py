"""`divergence` of a rank's words: the op's results and gradients, with the numbers of all words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...library import OPS
from ...ops.losses.cosine import norm_of
from ...ops.losses.divergence import limit
from ...record import Op
from .collectives import gathered, of_each_rank
from .shard import VocabShard
from .token_losses import rank_lses

DIVERGENCE = OPS["divergence_forward"]
_KNOWN = (
    "known_student_lse", "known_teacher_lse", "known_student_lse_error", "known_teacher_lse_error",
)  # fmt: skip
# The kinds whose summands are of a mean of both distributions, or of their difference: no rank can
# compute its own before it knows both lse.
_AFTER_LSE = ("jsd", "tvd")


class Found(NamedTuple):
    """The results of `divergence_forward` for all words, no two of which share memory."""

    divergence: Tensor
    student_share: Tensor
    student_lse: Tensor
    teacher_lse: Tensor
    student_lse_error: Tensor
    teacher_lse_error: Tensor


def forward(op: Op, call: Any, shard: VocabShard) -> Found:
    """One all-gather of five numbers a token, for jsd and tvd two of four and of two, and for
    cosine one of three."""
    call = call._replace(kind=limit(call.kind, call.beta))
    return of_all_ranks(gathered(local_statistics(call), 0, shard.group), call, shard.group)


def backward(op: Op, call: Any, shard: VocabShard) -> tuple[Tensor | None, ...]:
    """The gradients of the rank's logits, from that of each token's divergence."""
    words = call.student_logits.shape[-1]
    grads = op.overload(*with_a_word(call._replace(kind=limit(call.kind, call.beta))))
    return tuple(None if grad is None else grad[..., :words] for grad in grads)


def with_a_word(call: Any) -> Any:
    """The call of a rank that has no words, with one that adds nothing to any sum: the op needs a
    word."""
    if call.student_logits.shape[-1]:
        return call
    value = 0.0 if call.kind == "cosine" else float("-inf")
    student, teacher = (
        pad(x, (0, 1), value=value) for x in (call.student_logits, call.teacher_logits)
    )
    return call._replace(student_logits=student, teacher_logits=teacher)


def local_statistics(call: Any) -> Tensor:
    """(4 or 5, ...): both lse of the rank's words and both errors, and for a kind that has sums of
    these words alone, the divergence. For cosine they are both norms and the cosine."""
    kind = call.kind
    if kind in _AFTER_LSE:
        call = call._replace(kind="forward_kl")
    divergence, share, *both = DIVERGENCE.overload(*with_a_word(call))
    if kind in _AFTER_LSE:
        return torch.stack(both)
    return torch.stack([*both[:2], share] if kind == "cosine" else [*both, divergence])


def of_all_ranks(gathered_ranks: Tensor, call: Any, group: str) -> Found:
    """The statistics of all words, from the gathered ones of the ranks and, for jsd and tvd, the
    rank's logits."""
    kind = call.kind
    count = {"cosine": 3, **dict.fromkeys(_AFTER_LSE, 4)}.get(kind, 5)
    ranks = of_each_rank(gathered_ranks, count).unbind(1)
    if kind == "cosine":
        found = _cosines(ranks)
    elif kind in _AFTER_LSE:
        (student_lse, student_error, _), (teacher_lse, teacher_error, _) = _both(ranks)
        both = (student_lse, teacher_lse, student_error, teacher_error)
        known = dict(zip(_KNOWN, both, strict=True))
        divergence, share, *_ = DIVERGENCE.overload(*with_a_word(call)._replace(**known))
        sums = of_each_rank(gathered(torch.stack([divergence, share]), 0, group), 2)
        found = Found(sums[:, 0].sum(0), sums[:, 1].sum(0), *both)
    else:
        found = _relative_entropies(ranks, kind)
    if call.target is None:
        return found
    return Found(*(value.masked_fill(call.target == call.ignore_index, 0.0) for value in found))


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
    of_student, of_teacher = (part / norm for part, norm in zip(parts, norms, strict=True))
    cosine = (cosines * of_student * of_teacher).sum(0)
    return Found(1 - cosine, cosine, *norms, *(torch.zeros_like(cosine) for _ in norms))
