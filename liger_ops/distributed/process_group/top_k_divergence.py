"""The divergence from a teacher that gives its top k words, over a sharded vocabulary."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ...ops.losses.top_k import check_teacher, distinct, divergence_of_classes
from .function import of_ranks, read
from .sharded_op import sharded_op


def _divergence(name: str, call: Any) -> Tensor:
    given, local = read(name, call, "target")
    ids, target, x = local["teacher_ids"], given.others["target"], local["x"]
    log_prob = given.whole("teacher_log_prob", call.teacher_log_prob)
    kind = (call.kind, call.beta, call.tail)
    check_teacher(given.op, x, ids, log_prob, target, *kind)
    # A rank without words calls no op that would check it.
    if ids.shape[:-1] != x.shape[:-1]:
        raise ValueError(
            f"{given.op}: teacher_ids must have the shape of the whole x but for its last"
            f" dimension, {tuple(x.shape[:-1])} and K, got {tuple(ids.shape)}"
        )
    ids = local["teacher_ids"] = distinct(ids, target, call.ignore_index)
    options = {"constant": ("rest_error",), **local}
    logits, rest, error = sharded_op(name, given.shard, ("logits", "rest"), **options)
    return divergence_of_classes(logits, rest, error, log_prob, ids, *kind, given.shard.V)


@of_ranks(_divergence)
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
        teacher_ids, teacher_log_prob: (..., K), of all tokens, with the words counted from the
            first of the whole vocabulary. They are whole on every rank, or DTensors, which are
            gathered. teacher_log_prob is differentiable; each rank has its whole gradient.
        target: (...), of all tokens, or None.

    Returns:
        (...), the same on every rank; float32, or float64 if x or teacher_log_prob is.
    """
    raise NotImplementedError
