"""Divergences over a sharded vocabulary, also from a teacher's top k words."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ...ops.losses.top_k import check_teacher, distinct, divergence_of_classes
from .arguments import read
from .function import of_ranks, sharded_op

TERMS = ("divergence", "cross_entropy")


def _divergence(name: str, call: Any) -> Tensor:
    shard, arguments = read(name, call)
    student, teacher = arguments["student_logits"], arguments["teacher_logits"]
    if teacher.shape != student.shape:
        raise ValueError(
            f"distributed.{name}: teacher_logits must have the shape of student_logits,"
            f" {tuple(student.shape)} on this rank, got {tuple(teacher.shape)}"
        )
    return sharded_op(name, shard, ("divergence",), arguments)[0]


def _linear_divergence(name: str, call: Any) -> tuple[Tensor, ...]:
    _check_teacher(name, call)
    shard, arguments = read(name, call)
    tokens = arguments["student_x"].shape[:-1]
    teacher = "teacher_x" if call.teacher_logits is None else "teacher_logits"
    if arguments[teacher].shape[:-1] != tokens:
        raise ValueError(
            f"distributed.{name}: {teacher} must have the tokens of student_x, {tuple(tokens)},"
            f" got shape {tuple(arguments[teacher].shape)}"
        )
    mask = arguments.pop("gradient_mask")
    if not any(mask):
        return sharded_op(name, shard, ("loss", *TERMS), arguments)
    # Two calls, because Dynamo takes every result that is not constant for one with a gradient (see
    # ShardedOp): the first has the gradients that the forward computed, of the loss alone.
    masked = {**arguments, "gradient_mask": mask}
    results = sharded_op(name, shard, ("loss",), masked, (*TERMS, "statistics"))
    return results[0], *sharded_op(name, shard, TERMS, arguments, known=results)


def _check_teacher(name: str, call: Any) -> None:
    if call.target is None and call.hard_weight > 0:
        raise ValueError(
            f"distributed.{name}: hard_weight must be a number of at least 0, and 0 without a"
            f" target, got {call.hard_weight}"
        )
    tensors = [
        n for n in call._fields if n.startswith("teacher_") and isinstance(getattr(call, n), Tensor)
    ]
    if tensors != ["teacher_logits"] and (
        "teacher_logits" in tensors or not {"teacher_x", "teacher_weight"} <= {*tensors}
    ):
        raise ValueError(
            f"distributed.{name}: the teacher must be teacher_x and teacher_weight, or"
            f" teacher_logits alone, got {', '.join(tensors) or 'none of them'}"
        )


@of_ranks(_divergence)
def divergence(
    student_logits: Tensor, teacher_logits: Tensor, kind: str = "jsd", beta: float = 0.5,
    temperature: float = 1.0, teacher_temperature: float | None = None,
    target: Tensor | None = None, ignore_index: int = -100,
    *, group: ProcessGroup | None = None, vocab_size: int | None = None,
) -> Tensor:  # fmt: skip
    """Compute `liger_ops.divergence` of logits that are sharded over words.

    The equations, kinds, options and precision are those of `liger_ops.divergence`, with V the
    words of all ranks; both logits are split alike. Each rank computes the lse of its words for
    student and teacher, and their rounding errors, by the op `divergence_forward`. With P_r and Q_r
    the teacher's and the student's probabilities of the words of rank r, one all-gather of five
    numbers a token gives

        forward_kl = sum_r P_r * (forward_kl_r + log(P_r / Q_r))

    and likewise reverse_kl; for the cosine it gathers three numbers. For jsd and tvd, an all-gather
    of four numbers gives each lse of all words. The op then reads the logits again, and a second
    all-gather adds up the ranks' sums. The backward has no collective: the op `divergence_backward`
    computes the gradients of a rank's logits from these sums.

    Sharding, errors and other differences are as for `cross_entropy`.

    Args:
        student_logits, teacher_logits: (..., V / ranks), the logits of the rank's words; or
            DTensors (..., V) on one mesh with the placement Shard(-1). Both have gradients.
        target: (...), whole on every rank, or None. It is only compared with ignore_index.

    Returns:
        (...), the same on every rank; float32, or float64 if the logits of either are.
    """
    raise NotImplementedError


@of_ranks(_linear_divergence)
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
    *, group: ProcessGroup | None = None, vocab_size: int | None = None,
    sequence_dim: int | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Compute `liger_ops.linear_divergence` of heads whose weights are sharded over words.

    The equations, options and results are those of `liger_ops.linear_divergence`, with V the words
    of all ranks, which the student and the teacher have in common. Each rank computes the logits of
    its own words for student and teacher, a chunk of tokens at a time; they are never gathered. The
    collectives of the divergence are those of `divergence`; with a target, the first one has three
    more numbers a token: lse, its rounding error, and the target's logit. The collectives of x, and
    the sharding, are as for `linear_cross_entropy`.

    If a gradient is needed and the reduction is "mean" or "sum", the forward computes the gradients
    of loss, in three matrix products of the student and one of the teacher; the numbers of a chunk
    are gathered while the next chunk's logits are computed. If divergence or cross_entropy is
    differentiated itself, and for the reduction "none", the backward computes both logits again,
    and communicates only the gradients of sharded rows. torch.compile does so too where its graph
    returns divergence or cross_entropy without `detach()`.

    With a soft cap, the capped logits of a chunk are in memory in float32. With both soft_weight
    and hard_weight, each term's gradient of the logits is rounded to x's dtype before they are
    added.

    Args:
        student_x, teacher_x: (..., D) and (..., E), as x of `linear_cross_entropy`; both are whole,
            or both the rank's rows.
        student_weight, teacher_weight: (V / ranks, D) and (V / ranks, E), the rank's words; or
            DTensors (V, D) and (V, E) on one mesh with the placement Shard(0).
        student_bias, teacher_bias: (V / ranks,); or DTensors (V,) with the placement Shard(0).
        teacher_logits: (..., V / ranks), of all tokens and the rank's words; or a DTensor (..., V)
            with the placement Shard(-1).
        target: (...), of all tokens and the whole vocabulary, or None.
        student_lora_a, teacher_lora_a: (R, D) and (S, E), whole on every rank.
        student_lora_b, teacher_lora_b: (V / ranks, R) and (V / ranks, S), the rank's words; or
            DTensors with the placement Shard(0).
        chunk_bytes: the size of a chunk of the logits of student and teacher together, otherwise as
            for `linear_cross_entropy`.

    Returns:
        loss, divergence, cross_entropy: each () or (...), as `liger_ops.linear_divergence` returns
            them; the same on every rank.
    """
    raise NotImplementedError


def _top_k_divergence(name: str, call: Any) -> Tensor:
    shard, arguments = read(name, call)
    names = ("x", "teacher_ids", "teacher_log_prob", "target")
    x, ids, log_prob, target = (arguments[name] for name in names)
    kind = (call.kind, call.beta, call.tail)
    check_teacher(f"distributed.{name}", x, ids, log_prob, target, *kind)
    # The op checks this too, but a rank without words does not call it.
    if ids.shape[:-1] != x.shape[:-1]:
        raise ValueError(
            f"distributed.{name}: teacher_ids must have the shape of the whole x but for its last"
            f" dimension, {tuple(x.shape[:-1])} and K, got {tuple(ids.shape)}"
        )
    ids = arguments["teacher_ids"] = distinct(ids, target, call.ignore_index)
    logits, rest, error = sharded_op(name, shard, ("logits", "rest"), arguments, ("rest_error",))
    return divergence_of_classes(logits, rest, error, log_prob, ids, *kind, shard.V)


@of_ranks(_top_k_divergence)
def linear_top_k_divergence(
    x: Tensor, weight: Tensor, teacher_ids: Tensor, teacher_log_prob: Tensor,
    bias: Tensor | None = None, target: Tensor | None = None,
    kind: str = "jsd", beta: float = 0.5, tail: str = "bucket",
    temperature: float = 1.0, softcap: float | None = None, logit_scale: float = 1.0,
    ignore_index: int = -100,
    accum_dtype: torch.dtype | None = None, chunk_bytes: int | None = None,
    lora_a: Tensor | None = None, lora_b: Tensor | None = None, lora_scale: float = 1.0,
    *, group: ProcessGroup | None = None, vocab_size: int | None = None,
    sequence_dim: int | None = None,
) -> Tensor:  # fmt: skip
    """Compute `liger_ops.linear_top_k_divergence` with a weight that is sharded over words.

    The equations, options, results, chunks and matrix products are those of
    `liger_ops.linear_top_k_divergence`, for the rank's words. The forward has one all-reduce of
    K + 2 * ranks float32 numbers a token: the logits of the listed words, each of which one rank
    has, and each rank's logsumexp of its other words with the rounding error. The collectives of x
    are those of `linear_cross_entropy` with the reduction "none".

    Sharding, errors and other differences are as for `linear_cross_entropy`. An entry of
    teacher_ids that is not below V gives NaN, on a CPU too.

    Args:
        teacher_ids, teacher_log_prob: (..., K), of all tokens, with the words counted from the
            first of the whole vocabulary. They are whole on every rank, or DTensors, which are
            gathered. teacher_log_prob is differentiable; each rank has its whole gradient.
        target: (...), of all tokens, or None.

    Returns:
        (...), the same on every rank; float32, or float64 if x or teacher_log_prob is.
    """
    raise NotImplementedError
