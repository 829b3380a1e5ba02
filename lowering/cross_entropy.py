"""cross_entropy on a device: checks and outputs, and the calls of the device's row functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import meta
from ..ops.cross_entropy import upstream


def forward(
    loss_and_gradient: Callable[..., None],
    reduce: Callable[..., None],
    rows: Callable[[Tensor], Tensor],
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
    plan: Any = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """`cross_entropy_forward`; `rows` makes (M, V) of the logits as the row functions take them."""
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
    target, weight, token_weight = map(_flat, (target, weight, token_weight))
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
        loss=_flat(losses),
        z_loss=_flat(z_losses),
        lse=_flat(lse),
        target_logit=_flat(target_logit),
        predicted_tokens=_flat(predicted_tokens),
        entropy=_flat(entropy),
        gradient=False,
        plan=plan,
    )
    reduce(
        _flat(losses),
        _flat(z_losses),
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


def backward(
    gradient: Callable[..., None],
    rows: Callable[[Tensor], Tensor],
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
    plan: Any = None,
) -> Tensor:
    """`cross_entropy_backward`; `rows` as of the forward."""
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
    gradient(
        # Of any stride, 0 too.
        *(
            None if grad is None else grad.reshape(-1)
            for grad in (dloss, dz_loss, dlse, dtarget_logit)
        ),
        rows(logits),
        *map(_flat, (target, weight, token_weight, lse)),
        dlogits.view(-1, logits.shape[-1]),
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        lse_square_scale=lse_square_scale,
        softcap=softcap,
        logit_scale=logit_scale,
        plan=plan,
    )
    return dlogits


def _flat(tensor: Any) -> Any:
    """A tensor, if there is one, with its elements one after the other; a contiguous one's view."""
    return None if tensor is None else tensor.reshape(-1).contiguous()
