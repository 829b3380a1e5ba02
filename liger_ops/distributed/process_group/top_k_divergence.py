"""Divergence from a teacher's top k words, over a sharded vocabulary."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ...ops.losses.top_k import check_teacher, distinct, divergence_of_classes
from .arguments import read
from .function import of_ranks
from .sharded_op import sharded_op


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
