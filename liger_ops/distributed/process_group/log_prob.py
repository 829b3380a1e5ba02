"""Log-probabilities and the entropy over a sharded vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from .arguments import arguments
from .sharded_op import sharded_op

RESULTS = ("log_prob", "entropy")


def log_prob(
    logits: Tensor, target: Tensor, temperature: float = 1.0, softcap: float | None = None,
    logit_scale: float = 1.0, ignore_index: int = -100,
    *, group: ProcessGroup | None = None, vocab_size: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`liger_ops.log_prob` of logits that are sharded over words.

    The equations, options, results and precision are those of `liger_ops.log_prob`. The forward has
    one all-gather of four numbers a token, lse, what rounding took from it, the target's logit and
    the entropy of a rank's words, and the backward none: the gradient of a rank's logits needs
    nothing of the others'.

    Sharding, errors and what else differs are as for `cross_entropy`.

    Args:
        logits: (..., V / ranks), the logits of the rank's words; or a DTensor (..., V) with the
            placement Shard(-1).
        target, temperature, softcap, logit_scale, ignore_index: as for `liger_ops.log_prob`.
        group, vocab_size: as for `cross_entropy`.

    Returns:
        log_prob, entropy: of target's shape, the same on every rank; float32, or float64 if the
            logits are.

    Raises:
        TypeError, ValueError: as `cross_entropy`.

    Source: as for `cross_entropy`.
    """
    op = "distributed.log_prob"
    given = arguments(op, "logits", logits, -1, {"target": target}, group, vocab_size)
    (whole,) = given.others
    given.check_target(given.sharded)
    options = (given.sharded, whole, temperature, softcap, logit_scale, ignore_index)
    return sharded_op("log_prob", given.shard, RESULTS, *options)


def linear_log_prob(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None,
    temperature: float = 1.0, softcap: float | None = None, logit_scale: float = 1.0,
    ignore_index: int = -100,
    accum_dtype: torch.dtype | None = None, chunk_bytes: int | None = None,
    lora_a: Tensor | None = None, lora_b: Tensor | None = None, lora_scale: float = 1.0,
    *, group: ProcessGroup | None = None, vocab_size: int | None = None,
    sequence_dim: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`liger_ops.linear_log_prob` with a weight that is sharded over words.

    The equations, options, results, chunks and products are those of `liger_ops.linear_log_prob`,
    of the rank's words. The collectives are one all-gather of four numbers a token in the forward,
    and for x those of `linear_cross_entropy` with the reduction "none".

    Sharding, errors and what else differs are as for `linear_cross_entropy`.

    Args:
        x, weight, target, bias: as for `linear_cross_entropy`.
        temperature, softcap, logit_scale, ignore_index, accum_dtype, chunk_bytes: as for
            `liger_ops.linear_log_prob`.
        lora_a, lora_b, lora_scale, group, vocab_size, sequence_dim: as for
            `linear_cross_entropy`.

    Returns:
        log_prob, entropy: of target's shape, the same on every rank; float32, or float64 if x is.

    Raises:
        TypeError, ValueError: as `linear_cross_entropy`.

    Source: as for `cross_entropy`.
    """
    op = "distributed.linear_log_prob"
    given = arguments(
        op, "weight", weight, 0, {"target": target}, group, vocab_size, bias=bias, x=x,
        sequence_dim=sequence_dim,
    )  # fmt: skip
    x, weight, bias, lora_x, lora_b = given.head(lora_a, lora_b, lora_scale)
    (whole,) = given.others
    given.check_target(x)
    return sharded_op(
        "linear_log_prob", given.shard, RESULTS, x, weight, whole, bias,
        temperature, softcap, logit_scale, ignore_index, accum_dtype, chunk_bytes,
        lora_x=lora_x, lora_b=lora_b,
    )  # fmt: skip
