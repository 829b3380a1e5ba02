"""cross_entropy. M tokens, V classes."""

from __future__ import annotations

import torch
from torch import Tensor

from ... import library, meta
from ...ops.cross_entropy import upstream
from ..sizes import cdiv, next_power_of_2
from .cross_entropy_kernels import (
    cross_entropy_backward_kernel,
    cross_entropy_kernel,
    cross_entropy_wide_kernel,
    reduce_kernel,
)
from .launch import Plan, launch, pipeline_stages, processors, rows


def plan_forward(logits: Tensor, gradient: bool = False) -> Plan:
    """Unmeasured: prefetched tiles of 32 elements a thread, because nothing else hides a row's
    latency from the threads that compute."""
    V = logits.shape[1]
    BLOCK_N = next_power_of_2(V)
    if BLOCK_N > 8192:
        stages = pipeline_stages(logits, 8192 * logits.element_size())
        # Where the row is walked again, so few programs run at once that it stays in the L2 cache.
        return Plan(1, 8192, threads=1024 if gradient else 256, stages=stages)
    BLOCK_M = max(1, 2048 // BLOCK_N)
    return Plan(BLOCK_M, BLOCK_N, threads=min(1024, max(128, BLOCK_M * BLOCK_N // 16)))


def plan_backward(logits: Tensor) -> Plan:
    M, V = logits.shape
    BLOCK_N = min(4096, next_power_of_2(V))
    BLOCK_M = max(1, 2048 // BLOCK_N)
    # As many programs to a row as keep every processor busy with short batches.
    splits = cdiv(8 * processors(logits), cdiv(M, BLOCK_M))
    programs = min(cdiv(V, BLOCK_N), splits)
    return Plan(BLOCK_M, BLOCK_N, threads=max(128, BLOCK_M * BLOCK_N // 16), programs=programs)


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
        BLOCK_M=1024,
        num_warps=8,
        # The assertion is compiled under debug, which would check integers for overflow too.
        debug=True,
        sanitize_overflow=False,
    )


def _class_weight_sum(weight: Tensor | None, label_smoothing: float) -> Tensor | None:
    """sum_c weight_c, where it is needed."""
    if weight is None or label_smoothing == 0:
        return None
    return weight.sum(dtype=torch.float32)


def _contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


@library.kernel("cross_entropy_forward", "cuda")
def cross_entropy_forward(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    token_weight: Tensor | None = None,
    num_items_in_batch: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    return_predicted: bool = False,
    return_entropy: bool = False,
    *,
    plan: Plan | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    outputs = meta.cross_entropy.cross_entropy_forward(
        logits,
        target,
        weight,
        token_weight,
        num_items_in_batch,
        ignore_index,
        reduction,
        label_smoothing,
        lse_square_scale,
        softcap,
        logit_scale,
        return_predicted,
        return_entropy,
    )
    loss, z_loss, lse, target_logit, total_weight, predicted_tokens, entropy = outputs
    losses, z_losses = loss, z_loss
    if reduction != "none":
        losses, z_losses = torch.empty_like(lse), torch.empty_like(lse)
    target, weight, token_weight = map(_contiguous, (target, weight, token_weight))
    loss_and_gradient(
        rows(logits),
        target,
        weight,
        token_weight,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        lse_square_scale=lse_square_scale,
        softcap=softcap,
        logit_scale=logit_scale,
        loss=losses,
        z_loss=z_losses,
        lse=lse,
        target_logit=target_logit,
        predicted_tokens=predicted_tokens,
        entropy=entropy,
        gradient=False,
        plan=plan,
    )
    reduce(
        losses,
        z_losses,
        target,
        weight,
        token_weight,
        num_items_in_batch,
        loss,
        z_loss,
        total_weight,
        V=logits.shape[-1],
        ignore_index=ignore_index,
        reduction=reduction,
    )
    return outputs


@library.kernel("cross_entropy_backward", "cuda")
def cross_entropy_backward(
    dloss: Tensor | None,
    dz_loss: Tensor | None,
    dlse: Tensor | None,
    dtarget_logit: Tensor | None,
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    token_weight: Tensor | None,
    num_items_in_batch: Tensor | None,
    lse: Tensor,
    total_weight: Tensor,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
    lse_square_scale: float,
    softcap: float | None,
    logit_scale: float,
    *,
    plan: Plan | None = None,
) -> Tensor:
    dlogits = meta.cross_entropy.cross_entropy_backward(
        dloss,
        dz_loss,
        dlse,
        dtarget_logit,
        logits,
        target,
        weight,
        token_weight,
        num_items_in_batch,
        lse,
        total_weight,
        ignore_index,
        reduction,
        label_smoothing,
        lse_square_scale,
        softcap,
        logit_scale,
    )
    dloss, dz_loss = (
        upstream(grad, lse, total_weight, num_items_in_batch, reduction)
        for grad in (dloss, dz_loss)
    )
    V = logits.shape[-1]
    gradient(
        *(
            None if grad is None else grad.reshape(-1)
            for grad in (dloss, dz_loss, dlse, dtarget_logit)
        ),
        rows(logits),
        target.contiguous(),
        _contiguous(weight),
        _contiguous(token_weight),
        lse.contiguous(),
        dlogits.view(-1, V),
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        lse_square_scale=lse_square_scale,
        softcap=softcap,
        logit_scale=logit_scale,
        plan=plan,
    )
    return dlogits
