"""cross_entropy. M tokens, V classes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ... import library
from .. import cross_entropy as by_rows
from ..sizes import cdiv, next_power_of_2
from .cross_entropy_kernels import (
    cross_entropy_backward_kernel,
    cross_entropy_kernel,
    cross_entropy_wide_kernel,
)
from .cross_entropy_reduction import reduce_kernel
from .launch import WARP_SIZE, Plan, dependent_launch, launch, pipeline_stages, processors, rows


def plan_forward(logits: Tensor, gradient: bool = False) -> Plan:
    V = logits.shape[1]
    BLOCK_N = next_power_of_2(V)
    if BLOCK_N <= 8192:
        BLOCK_M = max(1, 2048 // BLOCK_N)
        return Plan(BLOCK_M, BLOCK_N, threads=min(1024, max(128, BLOCK_M * BLOCK_N // 16)))
    if not gradient:
        # 95% of the copy rate for (8192, 32768) in bfloat16 on an H200.
        stages = pipeline_stages(logits, 8192 * logits.element_size())
        return Plan(BLOCK_M=1, BLOCK_N=8192, threads=256, stages=stages)
    # Where the row is walked again, no stage of it waits in shared memory: 91% for (8192, 32768),
    # with 3 stages 86%; 77% for (2092, 128256), of which all rows at work leave the L2 cache.
    return Plan(BLOCK_M=1, BLOCK_N=8192 if V <= 65536 else 16384, threads=512)


def plan_backward(logits: Tensor) -> Plan:
    M, V = logits.shape
    BLOCK_N = min(4096 if V <= 32768 else 8192, next_power_of_2(V))
    BLOCK_M = max(1, 2048 // BLOCK_N)
    threads = max(128, BLOCK_M * BLOCK_N // 16)
    if V > BLOCK_N:
        # 16 bytes a thread: 94% of the H200's copy rate for (8192, 32768) in bfloat16, of 32 bytes
        # 90%; 94% for (4096, 128256), in tiles of 4096 93%, there of 32 bytes 90%.
        threads = min(1024, BLOCK_N * logits.element_size() // 16)
    # As many programs to a row as keep every processor busy with short batches.
    splits = cdiv(8 * processors(logits), cdiv(M, BLOCK_M))
    programs = min(cdiv(V, BLOCK_N), splits)
    return Plan(BLOCK_M, BLOCK_N, threads, programs)


def loss_and_gradient(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    token_weight: Tensor | None,
    *,
    ignore_index: int,
    label_smoothing: float,
    lse_square_scale: float,
    softcap: float | None,
    logit_scale: float,
    loss: Tensor,
    z_loss: Tensor,
    lse: Tensor,
    target_logit: Tensor,
    predicted_tokens: Tensor | None,
    entropy: Tensor | None,
    gradient: bool,
    plan: Plan | None = None,
) -> None:
    """Fill what is given of each token, and with `gradient` write d(sum of loss) / dlogits over the
    logits.

    logits: (M, V) with unit stride in the last dimension; everything else of a token, and weight,
    contiguous.
    """
    M, V = logits.shape
    if M == 0:
        return
    plan = plan or plan_forward(logits, gradient)
    arguments = (
        logits,
        target,
        weight,
        _class_weight_sum(weight, label_smoothing),
        token_weight,
        loss,
        z_loss,
        lse,
        target_logit,
        predicted_tokens,
        entropy,
    )
    scalars = (
        V,
        logits.stride(0),
        ignore_index,
        label_smoothing or None,
        lse_square_scale,
        softcap,
        None if logit_scale == 1 else logit_scale,
    )
    options = {"GRADIENT": gradient, "BLOCK_N": plan.BLOCK_N, "num_warps": plan.num_warps}
    if plan.BLOCK_N >= V:
        launch(
            cross_entropy_kernel,
            (cdiv(M, plan.BLOCK_M),),
            logits,
            *arguments,
            M,
            *scalars,
            BLOCK_M=plan.BLOCK_M,
            **options,
        )
    else:
        # The weights of label smoothing would be prefetched too, and take as much again.
        weighted = weight is not None and label_smoothing != 0
        # What a thread loads at once.
        fold = min(plan.BLOCK_N, 16 // logits.element_size())
        launch(
            cross_entropy_wide_kernel,
            (M,),
            logits,
            *arguments,
            *scalars,
            FOLD=fold,
            STAGES=1 if weighted else plan.stages,
            **options,
        )


def gradient(
    dloss: Tensor | None,
    dz_loss: Tensor | None,
    dlse: Tensor | None,
    dtarget_logit: Tensor | None,
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    token_weight: Tensor | None,
    lse: Tensor,
    dlogits: Tensor,
    *,
    ignore_index: int,
    label_smoothing: float,
    lse_square_scale: float,
    softcap: float | None,
    logit_scale: float,
    plan: Plan | None = None,
) -> None:
    """Fill dlogits, which may be the logits themselves.

    The incoming gradients: (M,) of any stride, 0 too, with the reduction's factor in them. logits
    and dlogits: (M, V) with unit stride in the last dimension. The others are contiguous.
    """
    M, V = logits.shape
    if M == 0:
        return
    plan = plan or plan_backward(logits)
    upstream = (dloss, dz_loss, dlse, dtarget_logit)
    launch(
        cross_entropy_backward_kernel,
        (cdiv(M, plan.BLOCK_M), min(cdiv(V, plan.BLOCK_N), max(1, plan.programs))),
        logits,
        *upstream,
        logits,
        target,
        weight,
        _class_weight_sum(weight, label_smoothing),
        token_weight,
        lse,
        dlogits,
        M,
        V,
        *(0 if grad is None else grad.stride(0) for grad in upstream),
        logits.stride(0),
        dlogits.stride(0),
        ignore_index,
        label_smoothing or None,
        lse_square_scale,
        softcap,
        None if logit_scale == 1 else logit_scale,
        BLOCK_M=plan.BLOCK_M,
        BLOCK_N=plan.BLOCK_N,
        STAGES=plan.stages,
        num_warps=plan.num_warps,
    )


def reduce(
    losses: Tensor,
    z_losses: Tensor,
    target: Tensor,
    weight: Tensor | None,
    token_weight: Tensor | None,
    num_items_in_batch: Tensor | None,
    loss: Tensor,
    z_loss: Tensor,
    total_weight: Tensor,
    *,
    V: int,
    ignore_index: int,
    reduction: str,
) -> None:
    """Fill total_weight, and but for the reduction "none" loss and z_loss, of the tokens' own.

    It is here that a target out of range stops the GPU. All contiguous.
    """
    launch(
        reduce_kernel,
        (1,),
        losses,
        losses,
        z_losses,
        target,
        weight,
        token_weight,
        num_items_in_batch,
        loss,
        z_loss,
        total_weight,
        target.numel(),
        V,
        ignore_index,
        REDUCTION=reduction,
        # 8192 tokens take one round of loads: 7 us on an H200, 13 in rounds of 1024.
        BLOCK_M=min(8192, next_power_of_2(max(1, target.numel()))),
        num_warps=1024 // WARP_SIZE,
        **dependent_launch(losses),
        # The assertion is compiled under debug, which would check integers for overflow too.
        debug=True,
        sanitize_overflow=False,
    )


def _class_weight_sum(weight: Tensor | None, label_smoothing: float) -> Tensor | None:
    """sum_c weight_c, where it is needed."""
    if weight is None or label_smoothing == 0:
        return None
    return weight.sum(dtype=torch.float32)


@library.kernel("cross_entropy_forward", "cuda")
def cross_entropy_forward(*args: Any, **kwargs: Any) -> tuple[Tensor | None, ...]:
    return by_rows.forward(loss_and_gradient, reduce, rows, *args, **kwargs)


@library.kernel("cross_entropy_backward", "cuda")
def cross_entropy_backward(*args: Any, **kwargs: Any) -> Tensor:
    return by_rows.backward(gradient, rows, *args, **kwargs)
