"""Cross-entropy over a sharded vocabulary."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ...library import OPS
from ..vocab_parallel import CLASS_WEIGHTS
from .arguments import read
from .function import of_ranks, sharded_op


def _loss(name: str, call: Any) -> Tensor:
    shard, arguments = read(name, call)
    class_weight = arguments[CLASS_WEIGHTS[name]]
    if class_weight is not None and tuple(class_weight.shape) != (shard.V,):
        raise ValueError(
            f"distributed.{name}: the class weight must have every word on each rank,"
            f" ({shard.V},), got {tuple(class_weight.shape)}"
        )
    return sharded_op(name, shard, ("loss",), arguments)[0]


def of_head(
    head: tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None], target: Tensor,
    **options: Any,
) -> Tensor:  # fmt: skip
    """Compute `linear_cross_entropy` of DTensors for a head whose LoRA has its first product.

    head: x, weight, bias, lora_x and lora_b. lora_x = x @ lora_a.T, (..., R), has x's placement,
    and lora_b is sharded over words; both are None without LoRA.
    """
    x, weight, bias, lora_x, lora_b = head
    call_of = OPS["linear_cross_entropy_forward"].arguments
    call = call_of(x, weight, target, bias, lora_x=lora_x, lora_b=lora_b, **options)
    return _loss("linear_cross_entropy", call)


@of_ranks(_loss)
def cross_entropy(
    logits: Tensor, target: Tensor, weight: Tensor | None = None,
    token_weight: Tensor | None = None, num_items_in_batch: Tensor | None = None,
    ignore_index: int = -100, reduction: str = "mean", label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0, softcap: float | None = None, logit_scale: float = 1.0,
    *, group: ProcessGroup | None = None, vocab_size: int | None = None,
) -> Tensor:  # fmt: skip
    """Compute `liger_ops.cross_entropy` of logits that are sharded over words.

    The equations, options and precision are those of `liger_ops.cross_entropy`, with V the words of
    all ranks. From its own words, each rank computes lse_r and its rounding error, the target's
    logit, and with label smoothing the sum of the logits, both relative to lse_r, by the op
    `cross_entropy_forward`. One all-gather of these three or four numbers a token gives

        lse_i = log(sum_r exp(lse_ir))

    and the loss, which is the same on every rank to the last bit. The backward has no collective:
    the gradient of a rank's logits follows from these logits and lse_i, by the op
    `cross_entropy_backward`.

    Ranks hold adjacent words, as `torch.chunk` splits them: each has ceil(V / ranks) words, the
    last ones fewer or none. Only the logits are sharded: pass them as a DTensor on a mesh of one
    dimension, or the rank's own logits with `group` and `vocab_size`. Every rank calls the function
    with the same options and the same values of the other arguments, and calls backward on the same
    function of the loss, as if it computed the loss alone; gradients are not averaged over the
    ranks. If another argument is a DTensor, it is gathered.

    The host never waits for a device. torch.compile traces the function with its collectives, which
    are `torch.distributed._functional_collectives`, and each op of a rank is one node.
    `torch.distributed.tensor.parallel.loss_parallel` changes nothing. There is no second
    derivative: `create_graph=True` and `torch.func` transforms raise.

    Args:
        logits: (..., V / ranks), floating point, the logits of the rank's words; or a DTensor
            (..., V) with the placement Shard(-1).
        weight: (V,), the weight of every word.

    Returns:
        (), or target's shape for the reduction "none"; a plain tensor, float32, or float64 if the
        logits are. The loss of a token is NaN if its target is out of range.
    """
    raise NotImplementedError


@of_ranks(_loss)
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
    """Compute `liger_ops.linear_cross_entropy` with a weight that is sharded over words.

    The equations, options and precision are those of `liger_ops.linear_cross_entropy`, with V the
    words of all ranks. Each rank computes the logits of its own words, a chunk of tokens at a time;
    they are never gathered. Collectives, results and sharding are as for `cross_entropy`; only the
    weight and the bias are sharded over words.

    x is whole on every rank, or its rows are sharded over the same ranks (sequence parallelism). If
    it is whole, its gradient is all-reduced; pass the replicated x itself, and not the result of a
    function whose backward all-reduces too. If it is sharded, the forward gathers it, and the
    backward reduce-scatters its gradient. Both are in x's dtype, but for the float32 gradient of a
    float16 x that is computed in the forward.

    If a gradient is needed and the reduction is "mean" or "sum", the forward computes it, a chunk
    of tokens at a time, with one all-gather a chunk: forward and backward together take three
    matrix products of the sizes M, V / ranks and D. The next chunk's logits are computed while the
    numbers of a chunk are gathered, and the gradient of weight while that of x is all-reduced. For
    the reduction "none", the forward has one all-gather, and the backward recomputes the logits and
    all-reduces the gradient of x: four products. Sums over the chunks are in accum_dtype, as for
    `liger_ops.linear_cross_entropy`; a second backward computes the gradient of weight again.

    Memory, beside the result and the gradients: the whole x; three chunks of logits (the next
    chunk's logits, a chunk's logits and their gradient), or one for the reduction "none"; and the
    accum_dtype sum of weight's gradient, unless all tokens are one bfloat16 chunk. A single chunk
    takes its logits and their gradient, and then the gradient of weight in the memory of the
    logits.

    Args:
        chunk_bytes: the size of a chunk of the logits of the rank with most words, in x's dtype;
            None takes LIGER_OPS_LOGITS_BYTES, or 384 MiB, or all tokens if they take no more memory
            than several chunks of 384 MiB do. It must be the same on every rank.

    Returns:
        As `cross_entropy`.
    """
    raise NotImplementedError
