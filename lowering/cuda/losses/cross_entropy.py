"""cross_entropy. M tokens, V classes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...common.losses.cross_entropy import TokenTensors, register
from ...common.tensors import cdiv, next_power_of_2, tile_width
from ..launch import (
    WARP_SIZE,
    Plan,
    WholeRow,
    dependent_launch,
    launch,
    launch_whole_rows,
    pipeline_stages,
    plan_whole_rows,
    processors,
    rows,
)
from .cross_entropy_kernels import (
    cross_entropy_backward_kernel,
    cross_entropy_kernel,
    cross_entropy_online_kernel,
)
from .token_loss import reduce_kernel


@dataclass(frozen=True)
class Online(Plan):
    """A program reads its row in tiles and keeps a running maximum and sum: online softmax.

    It loads `num_stages` tiles ahead. If it writes the gradient, it reads the row a second time.
    """

    num_stages: int = 1


@dataclass(frozen=True)
class SplitRows(Plan):
    """`programs` programs share BLOCK_M rows."""

    BLOCK_M: int = 1
    programs: int = 1


def plan_forward(logits: Tensor, gradient: bool = False) -> WholeRow | Online:
    """Plan whole rows up to 8192 classes, and online softmax beyond. `gradient`: the kernel also
    writes the gradient."""
    V = logits.shape[1]
    if V <= 8192:
        return plan_whole_rows(V, 1024)
    if not gradient:
        # 95% of the copy rate for (8192, 32768) in bfloat16 on an H200.
        num_stages = pipeline_stages(logits, 8192 * logits.element_size())
        return Online(8192, 256, num_stages)
    # A second pass finds more of the row in the caches if no stage waits in shared memory: 91% for
    # (8192, 32768), and 86% with 3 stages; 77% for (2092, 128256), where the rows under way do not
    # fit in the L2 cache.
    return Online(8192 if V <= 65536 else 16384, 512)


def plan_backward(logits: Tensor) -> SplitRows:
    """Plan programs that share rows."""
    M, V = logits.shape
    BLOCK_N = min(4096 if V <= 32768 else 8192, next_power_of_2(V))
    BLOCK_M = max(1, 2048 // BLOCK_N)
    threads = max(128, BLOCK_M * BLOCK_N // 16)
    if V > BLOCK_N:
        # 16 bytes a thread: 94% of the H200's copy rate for (8192, 32768) in bfloat16, and 90% with
        # 32 bytes. For (4096, 128256) 94%, in tiles of 4096 93%, and in those with 32 bytes 90%.
        threads = min(1024, BLOCK_N * logits.element_size() // 16)
    # As many programs to a row as keep every processor busy with short batches.
    splits = cdiv(8 * processors(logits), cdiv(M, BLOCK_M))
    return SplitRows(BLOCK_N, threads, BLOCK_M, min(cdiv(V, BLOCK_N), splits))


def loss_and_gradient(
    call: Any, logits: Tensor, tokens: TokenTensors, gradient: bool, plan: Plan | None = None
) -> None:
    """Fill the results of each token that are not None; with `gradient` write d(sum of loss) /
    dlogits over the logits.

    logits: (M, V) with unit stride in the last dimension.
    """
    M, V = logits.shape
    if M == 0:
        return
    plan = plan or plan_forward(logits, gradient)
    weight, target, *others = tokens
    arguments = (logits, target, weight, _class_weight_sum(call, weight), *others)
    scalars = (V, logits.stride(0), *_options(call))
    if isinstance(plan, WholeRow):
        args = (*arguments, M, *scalars)
        launch_whole_rows(cross_entropy_kernel, plan, logits, *args, GRADIENT=gradient)
    else:
        # With more stages the class weights of label smoothing would be prefetched too, and take as
        # much shared memory as the logits.
        weighted = weight is not None and call.label_smoothing != 0
        # A thread loads 16 bytes at once.
        fold = min(plan.BLOCK_N, 16 // logits.element_size())
        launch(
            cross_entropy_online_kernel, (M,), logits,
            *arguments, *scalars,
            GRADIENT=gradient, BLOCK_N=plan.BLOCK_N, FOLD=fold,
            NUM_STAGES=1 if weighted else plan.num_stages, num_warps=plan.num_warps,
        )  # fmt: skip


def gradient(
    call: Any, upstream: Sequence[Tensor | None], logits: Tensor,
    tokens: TokenTensors, dlogits: Tensor, plan: Plan | None = None,
) -> None:  # fmt: skip
    """Fill dlogits, which may be the logits themselves.

    upstream: the incoming gradients of loss, z_loss, lse, target_logit and entropy, (M,) of any
    stride, also 0, with the reduction's factor included; None for an absent one. logits and
    dlogits: (M, V) with unit stride in the last dimension.
    """
    M, V = logits.shape
    if M == 0:
        return
    plan = plan or plan_backward(logits)
    launch(
        cross_entropy_backward_kernel,
        (cdiv(M, plan.BLOCK_M), min(cdiv(V, plan.BLOCK_N), plan.programs)), logits,
        *upstream, logits, tokens.target, tokens.weight, _class_weight_sum(call, tokens.weight),
        tokens.token_weight, tokens.lse, tokens.lse_error, tokens.entropy, dlogits,
        M, V,
        *(0 if grad is None else grad.stride(0) for grad in upstream),
        logits.stride(0), dlogits.stride(0), *_options(call),
        BLOCK_M=plan.BLOCK_M, BLOCK_N=plan.BLOCK_N, NUM_STAGES=1, num_warps=plan.num_warps,
    )  # fmt: skip


def reduce(
    call: Any, V: int, tokens: TokenTensors,
    loss: Tensor | None, z_loss: Tensor | None, total_weight: Tensor,
) -> None:  # fmt: skip
    """Fill total_weight and, unless the reduction is "none", loss and z_loss, from those of the
    tokens.

    This kernel also checks the targets: one out of range stops the GPU.
    """
    M = tokens.target.numel()
    launch(
        reduce_kernel, (1,), tokens.target,
        tokens.loss, tokens.z_loss, tokens.target, tokens.weight, tokens.token_weight,
        call.num_items_in_batch, loss, z_loss, total_weight,
        M, V, call.ignore_index,
        REDUCTION=call.reduction,
        # 8192 tokens take one round of loads: 7 us on an H200, 13 in rounds of 1024.
        BLOCK_M=tile_width(M, 8192),
        num_warps=1024 // WARP_SIZE, **dependent_launch(tokens.target),
        # The assertion is compiled under debug, which would check integers for overflow too.
        debug=True, sanitize_overflow=False,
    )  # fmt: skip


def _options(call: Any) -> tuple[Any, ...]:
    """Return the scalar options of a kernel. One that is None has no code in the kernel."""
    return (
        call.ignore_index, call.label_smoothing or None, call.lse_square_scale or None,
        call.softcap, None if call.logit_scale == 1 else call.logit_scale,
    )  # fmt: skip


def _class_weight_sum(call: Any, weight: Tensor | None) -> Tensor | None:
    """Return sum_c weight_c, or None where it is not needed: without class weights or label
    smoothing."""
    if weight is None or call.label_smoothing == 0:
        return None
    return weight.sum(dtype=torch.float32)


register("cuda", rows, loss_and_gradient, gradient, reduce)
