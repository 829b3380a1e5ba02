"""Divergences over a sharded vocabulary."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ...ops.heads.head import HEAD, needed_gradients
from ...ops.heads.two_heads import divisor, result_dtype, token_weights
from ...ops.losses.cross_entropy import REDUCTIONS
from ...ops.losses.divergence import KINDS
from .arguments import Arguments, arguments
from .sharded_op import sharded_op

TERMS = ("divergence", "cross_entropy")


def divergence(
    student_logits: Tensor, teacher_logits: Tensor, kind: str = "jsd", beta: float = 0.5,
    temperature: float = 1.0, teacher_temperature: float | None = None,
    target: Tensor | None = None, ignore_index: int = -100,
    *, group: ProcessGroup | None = None, vocab_size: int | None = None,
) -> Tensor:  # fmt: skip
    """`liger_ops.divergence` of logits that are sharded over words.

    The equations, kinds, options and precision are those of `liger_ops.divergence`, with V the
    words of all ranks; both logits are split alike. Each rank computes both lse of its words and
    what rounding took from them, by the op `divergence_forward`. With P_r and Q_r the teacher's and
    the student's probabilities of the words of rank r, one all-gather of five numbers a token gives

        forward_kl = sum_r P_r * (forward_kl_r + log(P_r / Q_r))

    and likewise reverse_kl; for the cosine it has three. For jsd and tvd, one of four numbers gives
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
    teacher = given.of_words("teacher_logits", teacher_logits, -1)
    if teacher.shape != student.shape:
        raise ValueError(
            f"{op}: teacher_logits must have the shape of student_logits, {tuple(student.shape)} on"
            f" this rank, got {tuple(teacher.shape)}"
        )
    given.check_target(student)
    return sharded_op(
        "divergence", given.shard, ("divergence",), student, teacher, target, kind, beta,
        temperature, teacher_temperature, ignore_index,
    )[0]  # fmt: skip


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
    """`liger_ops.linear_divergence` of heads whose weights are sharded over words.

    The equations, options and results are those of `liger_ops.linear_divergence`, with V the words
    of all ranks, which the student and the teacher have in common. Each rank computes both logits
    of its own words, a chunk of tokens at a time; they are never whole. The collectives of the
    divergence are those of `divergence`; with a target, the first one has three more numbers a
    token, lse, what rounding took from it, and the target's logit. Those of x, and sharding, are as
    for `linear_cross_entropy`.

    If a gradient is needed and the reduction is "mean" or "sum", the forward computes that of loss,
    in three products of the student and one of the teacher; the numbers of a chunk are gathered
    beside the next chunk's logits. If divergence or cross_entropy is differentiated itself, and for
    the reduction "none", the backward computes both logits again, and gathers nothing but sharded
    rows' gradients. torch.compile does so too where its graph returns divergence or cross_entropy
    without `detach()`.

    With a soft cap, the capped logits of a chunk are in memory in float32. With both soft_weight
    and hard_weight, the gradients of the logits of both terms are rounded to x's dtype, and added.

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
        group, vocab_size, sequence_dim: as for `linear_cross_entropy`.
        The others: as for `liger_ops.linear_divergence`; chunk_bytes, the size of a chunk of both
            logits of the rank with most words, is as for `linear_cross_entropy`.

    Returns:
        loss, divergence, cross_entropy: each () or (...), as `liger_ops.linear_divergence` returns
            them; the same on every rank.

    Raises:
        TypeError, ValueError: as `linear_cross_entropy` and `liger_ops.linear_divergence`, or the
            teacher has other words than the student.

    Source: as for `liger_ops.linear_divergence` and `cross_entropy`.
    """
    op = "distributed.linear_divergence"
    _check_options(
        op, kind, beta, reduction,
        {
            "temperature": temperature, "teacher_temperature": teacher_temperature,
            "student_softcap": student_softcap, "teacher_softcap": teacher_softcap,
            "student_logit_scale": student_logit_scale, "teacher_logit_scale": teacher_logit_scale,
        },
        soft_weight, hard_weight, target is not None,
    )  # fmt: skip
    others = {
        "target": target, "token_weight": token_weight, "num_items_in_batch": num_items_in_batch,
    }  # fmt: skip
    given = arguments(
        op, "student_weight", student_weight, 0, others, group, vocab_size, bias=student_bias,
        x=student_x, sequence_dim=sequence_dim, prefix="student_",
    )  # fmt: skip
    student = given.head(student_lora_a, student_lora_b, student_lora_scale, "student_")
    lora = (teacher_lora_a, teacher_lora_b, teacher_lora_scale)
    shape = student.x.shape[:-1]
    teacher, logits = _teacher(
        op, given, shape, teacher_x, teacher_weight, teacher_bias, teacher_logits, lora,
        sequence_dim,
    )  # fmt: skip
    target, token_weight, num_items_in_batch = given.others
    given.check_target(student.x)
    call: dict[str, Any] = {
        **{f"student_{name}": tensor for name, tensor in zip(HEAD, student, strict=True)},
        **{f"teacher_{name}": tensor for name, tensor in zip(HEAD, teacher, strict=True)},
        "teacher_logits": logits, "target": target, "token_weight": token_weight,
        "kind": kind, "beta": beta,
        "temperature": temperature, "teacher_temperature": teacher_temperature,
        "student_softcap": student_softcap, "teacher_softcap": teacher_softcap,
        "student_logit_scale": student_logit_scale, "teacher_logit_scale": teacher_logit_scale,
        "soft_weight": soft_weight, "hard_weight": hard_weight, "ignore_index": ignore_index,
        "accum_dtype": accum_dtype, "chunk_bytes": chunk_bytes,
    }  # fmt: skip
    # The mean's divisor, of which Inductor is not to sum constants, is computed here.
    options = {**call, "reduction": "none" if reduction == "none" else "sum"}
    of_call = ("linear_divergence", given.shard)
    mask = needed_gradients(student, reduction)
    if any(mask):
        found = sharded_op(
            *of_call, ("loss",), constant=(*TERMS, "statistics"), gradient_mask=mask, **options
        )
        loss, (divergence, cross_entropy) = (
            found[0],
            sharded_op(*of_call, TERMS, known=found, **options),
        )
    else:
        loss, divergence, cross_entropy = sharded_op(*of_call, ("loss", *TERMS), **options)
    if reduction != "mean":
        return loss, divergence, cross_entropy
    named = SimpleNamespace(**call, reduction="mean", num_items_in_batch=num_items_in_batch)
    weights = token_weights(named, result_dtype(named))
    items = divisor(named, weights, all_one=target is None and token_weight is None)
    hard = None if cross_entropy is None else cross_entropy / items
    return loss / items, divergence / items, hard


def _teacher(
    op: str, given: Arguments, shape: torch.Size, x: Tensor | None, weight: Tensor | None,
    bias: Tensor | None, logits: Tensor | None,
    lora: tuple[Tensor | None, Tensor | None, float], sequence_dim: int | None,
) -> tuple[Any, Tensor | None]:  # fmt: skip
    """The tensors of the teacher's head, or its logits."""
    named = {
        "teacher_x": x, "teacher_weight": weight, "teacher_bias": bias, "teacher_logits": logits,
        "teacher_lora_a": lora[0], "teacher_lora_b": lora[1],
    }  # fmt: skip
    present = [name for name, tensor in named.items() if tensor is not None]
    for name, tensor in named.items():
        if tensor is not None and tensor.requires_grad:
            raise ValueError(
                f"{op}: {name} must not require a gradient, as the teacher is a constant; pass"
                f" {name}.detach()"
            )
    if (logits is not None and len(present) > 1) or (
        logits is None and (x is None or weight is None)
    ):
        raise ValueError(
            f"{op}: the teacher must be teacher_x and teacher_weight, or teacher_logits alone, got"
            f" {', '.join(present) or 'none of them'}"
        )
    if logits is not None:
        logits = given.of_words("teacher_logits", logits, -1)
        _check_tokens(op, "teacher_logits", logits, shape)
        return (None,) * len(HEAD), logits
    assert x is not None and weight is not None
    weight = given.of_words("teacher_weight", weight)
    if bias is not None:
        bias = given.of_words("teacher_bias", bias)
    x = given.rows("teacher_x", x, sequence_dim)[0]
    _check_tokens(op, "teacher_x", x, shape)
    # A constant's gradient is not summed over the ranks.
    shard = given.shard._replace(sums_x=True)
    taught = given._replace(x=x, sharded=weight, bias=bias, shard=shard)
    return taught.head(*lora, "teacher_"), None


def _check_tokens(op: str, name: str, tensor: Tensor, shape: torch.Size) -> None:
    if tensor.shape[:-1] != shape:
        raise ValueError(
            f"{op}: {name} must have the tokens of student_x, {tuple(shape)}, got shape"
            f" {tuple(tensor.shape)}"
        )


def _check_options(
    op: str, kind: str, beta: float, reduction: str, positive: dict[str, float | None],
    soft_weight: float, hard_weight: float, labelled: bool,
) -> None:  # fmt: skip
    """Check on every rank what the ops of each would not, or only after a division."""
    for name, value, accepted in (("kind", kind, KINDS), ("reduction", reduction, REDUCTIONS)):
        if value not in accepted:
            raise ValueError(f"{op}: {name} must be one of {accepted}, got {value!r}")
    if not 0 <= beta <= 1:
        raise ValueError(f"{op}: beta must be from 0 to 1, got {beta}")
    for name, number in positive.items():
        if number is not None and not number > 0:
            raise ValueError(f"{op}: {name} must be a number above 0, got {number}")
    if not soft_weight >= 0:
        raise ValueError(f"{op}: soft_weight must be a number of at least 0, got {soft_weight}")
    if not hard_weight >= 0 or (hard_weight > 0 and not labelled):
        raise ValueError(
            f"{op}: hard_weight must be a number of at least 0, and 0 without a target, got"
            f" {hard_weight}"
        )
