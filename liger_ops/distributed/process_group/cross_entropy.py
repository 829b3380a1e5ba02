"""Cross-entropy over a sharded vocabulary."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ...ops.heads.head import Head, needed_gradients
from ...ops.losses.cross_entropy import REDUCTIONS
from .arguments import Arguments, arguments
from .sharded_op import sharded_op


def cross_entropy(
    logits: Tensor, target: Tensor, weight: Tensor | None = None,
    token_weight: Tensor | None = None, num_items_in_batch: Tensor | None = None,
    ignore_index: int = -100, reduction: str = "mean", label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0, softcap: float | None = None, logit_scale: float = 1.0,
    *, group: ProcessGroup | None = None, vocab_size: int | None = None,
) -> Tensor:  # fmt: skip
    """`liger_ops.cross_entropy` of logits that are sharded over words.

    The equations, options and precision are those of `liger_ops.cross_entropy`, with V the words of
    all ranks. Each rank computes from its own words lse_r, what rounding took from it, and the
    target's logit, and with label smoothing the sum of the logits, both relative to lse_r, by the
    op `cross_entropy_forward`. One all-gather of these three or four numbers a token gives

        lse_i = log(sum_r exp(lse_ir))

    and the loss, which is the same on every rank to the last bit. The backward has no collective:
    the gradient of a rank's logits follows from these logits and lse_i, by the op
    `cross_entropy_backward`.

    Ranks hold adjacent words, as `torch.chunk` splits them: each has ceil(V / ranks), the last ones
    fewer or none. Logits, and no other argument, are sharded: give them as a DTensor on a mesh of
    one dimension, or the rank's own with `group` and `vocab_size`. Every rank calls the function
    with the same options and the same values of the other arguments, and calls backward of the
    same function of the loss, as it does for a loss that it computes alone; gradients are not
    averaged over the ranks. A DTensor of these other arguments is gathered.

    No host waits for a device. torch.compile traces the function with its collectives, which are
    `torch.distributed._functional_collectives`, and the ops of a rank stay whole. Within
    `torch.distributed.tensor.parallel.loss_parallel` it does the same as without. There is no
    second derivative: `create_graph=True` and `torch.func` transforms raise.

    Args:
        logits: (..., V / ranks), floating point, the logits of the rank's words; or a DTensor
            (..., V) with the placement Shard(-1).
        target: (...), int64 or int32, of the whole vocabulary; each is ignore_index, or from 0 to
            V - 1.
        weight: (V,), the weight of every word.
        token_weight, num_items_in_batch, ignore_index, reduction, label_smoothing,
            lse_square_scale, softcap, logit_scale: as for `liger_ops.cross_entropy`.
        group: the process group whose ranks have the words, in the order of the ranks; None for a
            DTensor.
        vocab_size: V; None for a DTensor.

    Returns:
        (), or target's shape for the reduction "none"; a plain tensor, float32, or float64 if the
        logits are. The loss of a token is NaN if its target is out of range.

    Raises:
        TypeError: a tensor has another dtype.
        ValueError: a shape, a placement, a mesh or an option is not as above, or a tensor that has
            no gradient requires one.

    Source: Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using
    Model Parallelism", 2019.
    """
    op = "distributed.cross_entropy"
    others = {
        "target": target, "weight": weight, "token_weight": token_weight,
        "num_items_in_batch": num_items_in_batch,
    }  # fmt: skip
    given = arguments(op, "logits", logits, -1, others, group, vocab_size)
    _check(given, given.sharded, reduction)
    loss_options = (ignore_index, reduction, label_smoothing, lse_square_scale)
    return sharded_op(
        "cross_entropy", given.shard, ("loss",), given.sharded, *given.others, *loss_options,
        softcap, logit_scale,
    )[0]  # fmt: skip


def linear_cross_entropy(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None,
    class_weight: Tensor | None = None, token_weight: Tensor | None = None,
    num_items_in_batch: Tensor | None = None,
    ignore_index: int = -100, reduction: str = "mean", label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0, softcap: float | None = None, logit_scale: float = 1.0,
    accum_dtype: torch.dtype | None = None, chunk_bytes: int | None = None,
    lora_a: Tensor | None = None, lora_b: Tensor | None = None, lora_scale: float = 1.0,
    *, group: ProcessGroup | None = None, vocab_size: int | None = None,
    sequence_dim: int | None = None,
) -> Tensor:  # fmt: skip
    """`liger_ops.linear_cross_entropy` with a weight that is sharded over words.

    The equations, options and precision are those of `liger_ops.linear_cross_entropy`, with V the
    words of all ranks. Each rank computes the logits of its own words, a chunk of tokens at a time;
    they are never whole. Collectives, results and sharding are as for `cross_entropy`; the weight
    and the bias, and no other argument, are sharded over words.

    x is whole on every rank, or its rows are sharded over the same ranks (sequence parallelism). If
    it is whole, its gradient is all-reduced; give the x that the ranks share before any function
    that does that itself. If it is sharded, the forward gathers it, and the backward
    reduce-scatters its gradient. Both are in x's dtype, but for the float32 gradient of a float16
    x that is computed in the forward.

    If a gradient is needed and the reduction is "mean" or "sum", the forward computes it, a chunk
    of tokens at a time, with one all-gather a chunk: forward and backward together take three
    products of M, V / ranks and D. The next chunk's logits are computed while the numbers of a
    chunk are gathered, and the gradient of weight while that of x is all-reduced. For the reduction
    "none", there is one all-gather, and the backward recomputes the logits, then all-reduces: four
    products. Sums over the chunks are in accum_dtype, as for `liger_ops.linear_cross_entropy`; a
    second backward computes the gradient of weight again.

    Memory, beside the result and the gradients: x whole; three chunks of logits, the next chunk's
    and a chunk with its gradient, for the reduction "none" one; and the accum_dtype sum of weight's
    gradient, unless all tokens are one bfloat16 chunk. A single chunk takes its logits and their
    gradient, and after that weight's in the place of the logits.

    Args:
        x: (..., D), floating point: the whole, or the rank's part along `sequence_dim`, of which
            every rank has as many rows; or a DTensor with the placement Replicate() or Shard(d) of
            a dimension but the last, whose rows need not divide.
        weight: (V / ranks, D), the rank's words; or a DTensor (V, D) with the placement Shard(0).
        target: (...), of all tokens and the whole vocabulary, as for `cross_entropy`.
        bias: (V / ranks,); or a DTensor (V,) with the placement Shard(0).
        class_weight: (V,), the weight of every word.
        token_weight, num_items_in_batch, ignore_index, reduction, label_smoothing,
            lse_square_scale, softcap, logit_scale, accum_dtype: as for
            `liger_ops.linear_cross_entropy`.
        chunk_bytes: the size of a chunk of the logits of the rank with most words, in x's dtype;
            None takes LIGER_OPS_LOGITS_BYTES, or 384 MiB, or all tokens if they take no more memory
            than several chunks of 384 MiB do. It must be the same on every rank.
        lora_a: (R, D), floating point, the whole on every rank, or a DTensor with the placement
            Replicate(): with lora_b, a LoRA that is added to weight, as for
            `liger_ops.linear_cross_entropy`. Its gradient is whole on every rank.
        lora_b: (V / ranks, R), the rank's words; or a DTensor (V, R) with the placement Shard(0).
        lora_scale: the factor of lora_b @ lora_a.
        group, vocab_size: as for `cross_entropy`; None if weight is a DTensor.
        sequence_dim: the dimension along which x is sharded, or None if it is whole; None if weight
            is a DTensor: then x's placement says it, and an x that is no DTensor is whole.

    Returns:
        As `cross_entropy`.

    Raises:
        TypeError, ValueError: as `cross_entropy`.

    Source: as for `cross_entropy`.
    """
    op = "distributed.linear_cross_entropy"
    others = {
        "target": target, "class_weight": class_weight, "token_weight": token_weight,
        "num_items_in_batch": num_items_in_batch,
    }  # fmt: skip
    given = arguments(
        op, "weight", weight, 0, others, group, vocab_size, bias=bias, x=x,
        sequence_dim=sequence_dim,
    )  # fmt: skip
    return _of_head(
        given, given.head(lora_a, lora_b, lora_scale), reduction=reduction,
        ignore_index=ignore_index, label_smoothing=label_smoothing,
        lse_square_scale=lse_square_scale, softcap=softcap, logit_scale=logit_scale,
        accum_dtype=accum_dtype, chunk_bytes=chunk_bytes,
    )  # fmt: skip


def of_head(
    head: tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None], target: Tensor,
    token_weight: Tensor | None = None, num_items_in_batch: Tensor | None = None, **options: Any,
) -> Tensor:  # fmt: skip
    """`linear_cross_entropy` of DTensors, of a head whose LoRA has its first product already.

    head: x, weight, bias, lora_x and lora_b. lora_x, (..., R), has x's placement, and lora_b is
    sharded over words; both are None without LoRA.
    """
    x, weight, bias, lora_x, lora_b = head
    others = {
        "target": target, "class_weight": None, "token_weight": token_weight,
        "num_items_in_batch": num_items_in_batch,
    }  # fmt: skip
    op = "distributed.linear_cross_entropy"
    given = arguments(op, "weight", weight, 0, others, None, None, bias=bias, x=x)
    return _of_head(given, given.head_of_input(lora_x, lora_b), **options)


def _of_head(given: Arguments, head: Head, reduction: str = "mean", **options: Any) -> Tensor:
    _check(given, head.x, reduction)
    x, weight, bias, lora_x, lora_b = head
    target, *weights = given.others
    mask = needed_gradients(head, reduction)
    return sharded_op(
        "linear_cross_entropy", given.shard, ("loss",), x, weight, target, bias, *weights,
        reduction=reduction, gradient_mask=mask, lora_x=lora_x, lora_b=lora_b, **options,
    )[0]  # fmt: skip


def _check(given: Arguments, x: Tensor, reduction: str) -> None:
    op, class_weight = given.op, given.others[1]
    given.check_target(x)
    if class_weight is not None and tuple(class_weight.shape) != (given.shard.V,):
        raise ValueError(
            f"{op}: the class weight must have every word on each rank, ({given.shard.V},), got"
            f" {tuple(class_weight.shape)}"
        )
    if reduction not in REDUCTIONS:
        raise ValueError(f"{op}: reduction must be one of {REDUCTIONS}, got {reduction!r}")
