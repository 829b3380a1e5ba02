"""Divergences over a sharded vocabulary."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ...library import OPS
from ...ops.heads.head import HEAD
from ...ops.heads.two_heads import divisor, result_dtype, token_weights
from .arguments import RankArguments
from .function import of_ranks, read
from .sharded_op import sharded_op

TERMS = ("divergence", "cross_entropy")
_TEACHER = tuple(
    f"teacher_{name}" for name in ("x", "weight", "bias", "logits", "lora_a", "lora_b")
)


def _divergence(name: str, call: Any) -> Tensor:
    arguments, local = read(name, call)
    student = local["student_logits"]
    teacher = arguments.of_words("teacher_logits", call.teacher_logits, -1)
    if teacher.shape != student.shape:
        raise ValueError(
            f"{arguments.op}: teacher_logits must have the shape of student_logits,"
            f" {tuple(student.shape)} on this rank, got {tuple(teacher.shape)}"
        )
    local["teacher_logits"] = teacher
    return sharded_op(name, arguments.shard, ("divergence",), **local)[0]


def _linear_divergence(name: str, call: Any) -> tuple[Tensor, Tensor, Tensor | None]:
    if call.target is None and call.hard_weight > 0:
        raise ValueError(
            f"distributed.{name}: hard_weight must be a number of at least 0, and 0 without a"
            f" target, got {call.hard_weight}"
        )
    arguments, local = read(name, call)
    local |= _teacher(arguments, call, local["student_x"].shape[:-1])
    # The op computes sums, and the mean's divisor is computed here: as a number if all weights are
    # 1, because Inductor should not sum constants.
    whole = OPS[f"{name}_forward"].arguments(**local)
    local |= {
        "reduction": "none" if call.reduction == "none" else "sum",
        "num_items_in_batch": None,
    }
    mask = local.pop("gradient_mask")
    shared = (name, arguments.shard)
    if any(mask):
        # Two calls, because Dynamo takes every result that is not constant for one with a gradient
        # (see ShardedOp): the first has the gradients that the forward computed, of the loss alone.
        results = sharded_op(
            *shared, ("loss",), constant=(*TERMS, "statistics"), gradient_mask=mask, **local
        )
        loss, terms = results[0], [*sharded_op(*shared, TERMS, known=results, **local)]
    else:
        loss, *terms = sharded_op(*shared, ("loss", *TERMS), **local)
    divergence, cross_entropy = terms
    if call.reduction != "mean":
        return loss, divergence, cross_entropy
    weights = token_weights(whole, result_dtype(whole))
    are_ones = whole.target is None and whole.token_weight is None
    items = divisor(whole, weights, are_ones)
    hard = None if cross_entropy is None else cross_entropy / items
    return loss / items, divergence / items, hard


def _teacher(arguments: RankArguments, call: Any, shape: torch.Size) -> dict[str, Tensor | None]:
    """Read the tensors of the teacher's head, or its logits, as arguments of the op."""
    op, tensors = arguments.op, {name: getattr(call, name) for name in _TEACHER}
    present = [name for name, tensor in tensors.items() if tensor is not None]
    for name in present:
        if tensors[name].requires_grad:
            raise ValueError(
                f"{op}: {name} must not require a gradient, as the teacher is a constant; pass"
                f" {name}.detach()"
            )
    x, weight, bias, logits, *_ = tensors.values()
    if (logits is not None and len(present) > 1) or (
        logits is None and (x is None or weight is None)
    ):
        raise ValueError(
            f"{op}: the teacher must be teacher_x and teacher_weight, or teacher_logits alone, got"
            f" {', '.join(present) or 'none of them'}"
        )
    head: Any = (None,) * len(HEAD)
    if logits is not None:
        logits = arguments.of_words("teacher_logits", logits, -1)
        _check_tokens(op, "teacher_logits", logits, shape)
    else:
        weight = arguments.of_words("teacher_weight", weight)
        if bias is not None:
            bias = arguments.of_words("teacher_bias", bias)
        x = arguments.rows("teacher_x", x, call.sequence_dim)[0]
        _check_tokens(op, "teacher_x", x, shape)
        # sums_x=True keeps `head` from summing the gradient of lora_a, which is a constant here.
        shard = arguments.shard._replace(sums_x=True)
        head = arguments._replace(x=x, sharded=weight, bias=bias, shard=shard).head(
            call, "teacher_"
        )
    named = {f"teacher_{name}": tensor for name, tensor in zip(HEAD, head, strict=True)}
    return {**named, "teacher_logits": logits}


def _check_tokens(op: str, name: str, tensor: Tensor, shape: torch.Size) -> None:
    if tensor.shape[:-1] != shape:
        raise ValueError(
            f"{op}: {name} must have the tokens of student_x, {tuple(shape)}, got shape"
            f" {tuple(tensor.shape)}"
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
