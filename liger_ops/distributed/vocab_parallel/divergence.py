"""`divergence` over a sharded vocabulary: the op's results for all words, and the gradients of the
rank's words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...library import OPS
from ...ops.losses.divergence import limit, norm_of
from ...record import Op
from .shard import VocabShard, gathered, view_by_rank
from .token_losses import rank_lses

DIVERGENCE = OPS["divergence_forward"]
_KNOWN = (
    "known_student_lse", "known_teacher_lse", "known_student_lse_error", "known_teacher_lse_error",
)  # fmt: skip
# The kinds that sum functions of the mean or the difference of both distributions: a rank needs
# each lse of all words before it can sum over its own words.
_AFTER_LSE = ("jsd", "tvd")


class DivergenceResults(NamedTuple):
    """The results of `divergence_forward` for all words. No two of them share memory."""

    divergence: Tensor
    student_share: Tensor
    student_lse: Tensor
    teacher_lse: Tensor
    student_lse_error: Tensor
    teacher_lse_error: Tensor


def forward(op: Op, call: Any, shard: VocabShard) -> DivergenceResults:
    """Compute the op's results, with one all-gather of five numbers a token; for jsd and tvd with
    two all-gathers, of four and of two numbers; and for the cosine with one of three numbers."""
    call = call._replace(kind=limit(call.kind, call.beta))
    return combine_ranks(gathered(local_statistics(call), 0, shard.group), call, shard.group)


def backward(op: Op, call: Any, shard: VocabShard) -> tuple[Tensor | None, ...]:
    """Compute the gradients of the rank's logits from that of each token's divergence."""
    words = call.student_logits.shape[-1]
    grads = op.overload(*with_a_word(call._replace(kind=limit(call.kind, call.beta))))
    return tuple(None if grad is None else grad[..., :words] for grad in grads)


def with_a_word(call: Any) -> Any:
    """Give a rank without words one word that adds nothing to any sum, as the op needs a word."""
    if call.student_logits.shape[-1]:
        return call
    value = 0.0 if call.kind == "cosine" else float("-inf")
    student, teacher = (
        pad(x, (0, 1), value=value) for x in (call.student_logits, call.teacher_logits)
    )
    return call._replace(student_logits=student, teacher_logits=teacher)


def local_statistics(call: Any) -> Tensor:
    """Compute the statistics of the rank's words, (4 or 5, ...): lse of student and teacher, their
    rounding errors, and the divergence, if it is a sum over the rank's words alone. For the cosine
    they are (3, ...): the norms of student and teacher, and the cosine."""
    kind = call.kind
    if kind in _AFTER_LSE:
        call = call._replace(kind="forward_kl")
    divergence, share, *lses = DIVERGENCE.overload(*with_a_word(call))
    if kind in _AFTER_LSE:
        return torch.stack(lses)
    # For the cosine, the op returns it as student_share, and the norms in the place of each lse.
    return torch.stack([*lses[:2], share] if kind == "cosine" else [*lses, divergence])


def combine_ranks(gathered_ranks: Tensor, call: Any, group: str) -> DivergenceResults:
    """Compute the results for all words from the gathered statistics of the ranks and, for jsd and
    tvd, from the rank's logits."""
    kind = call.kind
    count = {"cosine": 3, **dict.fromkeys(_AFTER_LSE, 4)}.get(kind, 5)
    ranks = view_by_rank(gathered_ranks, count).unbind(1)
    if kind == "cosine":
        results = _cosines(ranks)
    elif kind in _AFTER_LSE:
        (student_lse, student_error, _), (teacher_lse, teacher_error, _) = _lses(ranks)
        lses = (student_lse, teacher_lse, student_error, teacher_error)
        known = dict(zip(_KNOWN, lses, strict=True))
        divergence, share, *_ = DIVERGENCE.overload(*with_a_word(call)._replace(**known))
        sums = view_by_rank(gathered(torch.stack([divergence, share]), 0, group), 2)
        results = DivergenceResults(sums[:, 0].sum(0), sums[:, 1].sum(0), *lses)
    else:
        results = _relative_entropies(ranks, kind)
    if call.target is None:
        return results
    return DivergenceResults(
        *(x.masked_fill(call.target == call.ignore_index, 0.0) for x in results)
    )


def _relative_entropies(ranks: Sequence[Tensor], kind: str) -> DivergenceResults:
    """Compute forward_kl or reverse_kl by the chain rule: with P_r and Q_r the teacher's and the
    student's probabilities of the words of rank r, forward_kl is
    sum_r P_r * (divergence_r + log(P_r / Q_r)), and in reverse_kl P and Q are exchanged."""
    divergences = ranks[4]
    (student_lse, student_error, log_Q), (teacher_lse, teacher_error, log_P) = _lses(ranks)
    log_w, log_other = (log_Q, log_P) if kind == "reverse_kl" else (log_P, log_Q)
    w = torch.exp(log_w)
    # If P_r or Q_r is 0, divergence_r is NaN, and log(P_r / Q_r) infinite.
    divergences = torch.where(log_other == float("-inf"), 0.0, divergences)
    terms = torch.where(w == 0, 0.0, w * (divergences + log_w - log_other))
    divergence = terms.sum(0)
    share = divergence.clone() if kind == "reverse_kl" else torch.zeros_like(divergence)
    return DivergenceResults(
        divergence, share, student_lse, teacher_lse, student_error, teacher_error
    )


def _lses(ranks: Sequence[Tensor]) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Call `rank_lses` for the student, and for the teacher."""
    return [rank_lses(ranks[side], ranks[2 + side]) for side in range(2)]


def _cosines(ranks: Sequence[Tensor]) -> DivergenceResults:
    """Compute the cosine of all words from the norms and cosines of the ranks' words."""
    student_norms, teacher_norms, cosines = ranks
    # The op returns inf as the norm of zeros.
    parts = [n.masked_fill(n == float("inf"), 0.0) for n in (student_norms, teacher_norms)]
    norms = [norm_of(n.movedim(0, -1)) for n in parts]
    of_student, of_teacher = (part / norm for part, norm in zip(parts, norms, strict=True))
    cosine = (cosines * of_student * of_teacher).sum(0)
    return DivergenceResults(1 - cosine, cosine, *norms, *(torch.zeros_like(cosine) for _ in norms))
