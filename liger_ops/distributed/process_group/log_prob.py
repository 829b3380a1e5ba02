"""Log-probabilities and the entropy over a sharded vocabulary."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from .arguments import read
from .function import of_ranks, sharded_op


def _results(name: str, call: Any) -> tuple[Any, ...]:
    shard, arguments = read(name, call)
    return sharded_op(name, shard, ("log_prob", "entropy"), arguments)


@of_ranks(_results)
def log_prob(
    logits: Tensor, target: Tensor, temperature: float = 1.0, softcap: float | None = None,
    logit_scale: float = 1.0, ignore_index: int = -100,
    *, group: ProcessGroup | None = None, vocab_size: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute `liger_ops.log_prob` of logits that are sharded over words.

    The equations, options, results and precision are those of `liger_ops.log_prob`. The forward has
    one all-gather of four numbers a token, the lse of a rank's words, its rounding error, the
    entropy and the target's logit, or the logits of K targets. The backward has no collective: it
    computes the gradient of a rank's logits from these logits and the lse of all words.

    Sharding, errors and other differences are as for `cross_entropy`.

    Args:
        logits: (..., V / ranks), the logits of the rank's words; or a DTensor (..., V) with the
            placement Shard(-1).
        target: (...) or (..., K), of all tokens and the whole vocabulary.

    Returns:
        log_prob: of target's shape, the same on every rank; float32, or float64 if the logits are.
        entropy: (...), of the same dtype.
    """
    raise NotImplementedError


@of_ranks(_results)
def linear_log_prob(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None,
    temperature: float = 1.0, softcap: float | None = None, logit_scale: float = 1.0,
    ignore_index: int = -100,
    accum_dtype: torch.dtype | None = None, chunk_bytes: int | None = None,
    lora_a: Tensor | None = None, lora_b: Tensor | None = None, lora_scale: float = 1.0,
    *, group: ProcessGroup | None = None, vocab_size: int | None = None,
    sequence_dim: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute `liger_ops.linear_log_prob` with a weight that is sharded over words.

    The equations, options, results, chunks and matrix products are those of
    `liger_ops.linear_log_prob`, for the rank's words. The collectives are one all-gather of four
    numbers a token in the forward, or of 3 + K for K targets, and for x those of
    `linear_cross_entropy` with the reduction "none".

    Sharding, errors and other differences are as for `linear_cross_entropy`.

    Args:
        target: (...) or (..., K), of all tokens and the whole vocabulary.

    Returns:
        log_prob: of target's shape, the same on every rank; float32, or float64 if x is.
        entropy: (...), of the same dtype.
    """
    raise NotImplementedError
