"""The most probable words over a sharded vocabulary."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from .arguments import read
from .function import of_ranks, sharded_op


def _top_k(name: str, call: Any) -> tuple[Tensor, Tensor]:
    shard, arguments = read(name, call)
    # The op checks this of a rank's words.
    if call.k > shard.V:
        raise ValueError(
            f"distributed.{name}: k must be at most the number of words, {shard.V}, got {call.k}"
        )
    log_prob, words = sharded_op(name, shard, ("log_prob",), arguments, ("words",))
    return words, log_prob


@of_ranks(_top_k)
def linear_top_k(
    x: Tensor, weight: Tensor, k: int | torch.SymInt, bias: Tensor | None = None,
    temperature: float = 1.0, softcap: float | None = None, logit_scale: float = 1.0,
    accum_dtype: torch.dtype | None = None, chunk_bytes: int | None = None,
    lora_a: Tensor | None = None, lora_b: Tensor | None = None, lora_scale: float = 1.0,
    *, group: ProcessGroup | None = None, vocab_size: int | None = None,
    sequence_dim: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute `liger_ops.linear_top_k` with a weight that is sharded over words.

    The equations, options, results, chunks and matrix products are those of
    `liger_ops.linear_top_k`, for the rank's words. Each rank finds its own k most probable words.
    The forward has one all-gather of k + 2 numbers a token, their logits, the lse of the rank's
    words and its rounding error, and one of the k words. Words are compared by their
    log-probabilities: those of nearly equal logits, on different ranks, may be in another order
    than on one device. The collectives of x are those of `linear_cross_entropy` with the reduction
    "none".

    Sharding, errors and other differences are as for `linear_cross_entropy`.

    Args:
        k: the number of words, from 1 to the number of words of all ranks.

    Returns:
        words: (..., k), int64, counted from the first of the whole vocabulary.
        log_prob: (..., k), float32, or float64 if x is. Both are the same on every rank.
    """
    raise NotImplementedError
