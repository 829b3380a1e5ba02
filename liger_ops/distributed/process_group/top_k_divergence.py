"""The divergence from a teacher that gives its top k words, over a sharded vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ...ops.losses.top_k import check_teacher, distinct, divergence_of_classes
from .arguments import arguments
from .sharded_op import sharded_op


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
    """`liger_ops.linear_top_k_divergence` with a weight that is sharded over words.

    The equations, options, results, chunks and products are those of
    `liger_ops.linear_top_k_divergence`, of the rank's words. The forward has one all-reduce of
    K + 2 * ranks float32 numbers a token: the logits of the listed words, each of which one rank
    has, and each rank's logsumexp of the others and what rounding took from it. The collectives for
    x are those of `linear_cross_entropy` with the reduction "none".

    Sharding, errors and what else differs are as for `linear_cross_entropy`. An entry of
    teacher_ids that is not below V gives NaN, also on a CPU.

    Args:
        x, weight, bias: as for `linear_cross_entropy`.
        teacher_ids, teacher_log_prob: (..., K), of all tokens, with the words counted from the
            first of the whole vocabulary. They are whole on every rank, or DTensors, which are
            gathered. teacher_log_prob is differentiable; each rank has its whole gradient.
        target: (...), of all tokens, or None.
        kind, beta, tail, temperature, softcap, logit_scale, ignore_index, accum_dtype, chunk_bytes:
            as for `liger_ops.linear_top_k_divergence`.
        lora_a, lora_b, lora_scale, group, vocab_size, sequence_dim: as for
            `linear_cross_entropy`.

    Returns:
        (...), the same on every rank; float32, or float64 if x or teacher_log_prob is.

    Raises:
        TypeError, ValueError: as `linear_cross_entropy` and `liger_ops.linear_top_k_divergence`.

    Source: as for `liger_ops.linear_top_k_divergence` and `cross_entropy`.
    """
    op = "distributed.linear_top_k_divergence"
    others = {"teacher_ids": teacher_ids, "target": target}
    given = arguments(
        op, "weight", weight, 0, others, group, vocab_size, bias=bias, x=x,
        sequence_dim=sequence_dim,
    )  # fmt: skip
    ids, target = given.others
    assert ids is not None
    log_prob = given.whole("teacher_log_prob", teacher_log_prob)
    head = given.head(lora_a, lora_b, lora_scale)
    check_teacher(op, head.x, ids, log_prob, target, kind, beta, tail)
    # A rank without words calls no op that would check it.
    if ids.shape[:-1] != head.x.shape[:-1]:
        raise ValueError(
            f"{op}: teacher_ids must have the shape of the whole x but for its last dimension,"
            f" {tuple(head.x.shape[:-1])} and K, got {tuple(ids.shape)}"
        )
    ids = distinct(ids, target, ignore_index)
    rows, weight, bias, lora_x, lora_b = head
    logits, rest, error = sharded_op(
        "linear_top_k_divergence", given.shard, ("logits", "rest"), rows, weight, ids, bias,
        temperature, softcap, logit_scale, accum_dtype, chunk_bytes, lora_x, lora_b,
        constant=("rest_error",),
    )  # fmt: skip
    return divergence_of_classes(
        logits, rest, error, log_prob, ids, kind, beta, tail, given.shard.V
    )
