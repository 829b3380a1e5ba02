"""Divergences over a sharded vocabulary."""

from __future__ import annotations

from torch import Tensor
from torch.distributed import ProcessGroup

from ..ops.divergence import limit
from .token_divergences import Options, TokenDivergences
from .words import arguments, check_target


def divergence(
    student_logits: Tensor, teacher_logits: Tensor, kind: str = "jsd", beta: float = 0.5,
    temperature: float = 1.0, teacher_temperature: float | None = None,
    target: Tensor | None = None, ignore_index: int = -100,
    *, group: ProcessGroup | None = None, vocab_size: int | None = None,
) -> Tensor:  # fmt: skip
    """`liger_ops.divergence` of logits that are sharded over words.

    The equations, kinds, options and precision are those of `liger_ops.divergence`, with V the
    words of all ranks; both logits are split alike. Each rank computes both lse of its words, by
    the op `divergence_forward`. With P_r and Q_r the teacher's and the student's probabilities of
    the words of rank r, one all-gather of three numbers a token gives

        forward_kl = sum_r P_r * (forward_kl_r + log(P_r / Q_r))

    and likewise reverse_kl, and the cosine. For jsd and tvd, an all-gather of two numbers gives
    both lse of all words, and a second one the sums of the summands of each rank's words, which the
    op computes in a second reading of the logits. The backward has no collective: the op
    `divergence_backward` computes the gradients of a rank's logits from these sums.

    Sharding, errors and what else differs are as for `cross_entropy`.

    Args:
        student_logits, teacher_logits: (..., V / ranks), the logits of the rank's words; or
            DTensors (..., V) on one mesh with the placement Shard(-1). Both have gradients.
        kind, beta, temperature, teacher_temperature: as for `liger_ops.divergence`.
        target: (...), whole on every rank, or None. It is only compared with ignore_index.
        ignore_index: the target of tokens that do not count.
        group, vocab_size: as for `cross_entropy`.

    Returns:
        (...), the same on every rank; float32, or float64 if the logits of either are.

    Raises:
        TypeError, ValueError: as `cross_entropy` and `liger_ops.divergence`.

    Source: as for `liger_ops.divergence` and `cross_entropy`.
    """
    op = "distributed.divergence"
    given = arguments(
        op, "student_logits", student_logits, -1, {"target": target}, group, vocab_size
    )
    student, target = given.sharded, given.others[0]
    teacher = given.also_sharded(op, "teacher_logits", teacher_logits, -1)
    if teacher.shape != student.shape:
        raise ValueError(
            f"{op}: teacher_logits must have the shape of student_logits, {tuple(student.shape)} on"
            f" this rank, got {tuple(teacher.shape)}"
        )
    if target is not None:
        check_target(op, target, student)
    if teacher_temperature is None:
        teacher_temperature = temperature
    options = Options(limit(kind, beta), beta, temperature, teacher_temperature, ignore_index)
    return TokenDivergences.apply(student, teacher, target, given.words.group, options)
