"""cross_entropy, by a device's row functions.

A device's `loss_and_gradient`, `gradient` and `reduce` are given the op's call for its options.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .. import library
from ..ops.cross_entropy import upstream
from .tensors import flat


def register(
    device: str,
    rows: Callable[[Tensor], Tensor],
    loss_and_gradient: Callable[..., None],
    gradient: Callable[..., None],
    reduce: Callable[..., None],
) -> None:
    """Register the row functions of a device; `rows` makes (M, V) of the logits as these take
    them."""
    module = loss_and_gradient.__module__

    @library.kernel("cross_entropy_forward", device, module=module)
    def cross_entropy_forward(
        call, loss, z_loss, lse, target_logit, total_weight, predicted_tokens, entropy, plan
    ):
        losses, z_losses = loss, z_loss
        if call.reduction != "none":
            losses, z_losses = torch.empty_like(lse), torch.empty_like(lse)
        targets, weight, token_weights = map(flat, (call.target, call.weight, call.token_weight))
        losses, z_losses = flat(losses), flat(z_losses)
        loss_and_gradient(
            call,
            rows(call.logits),
            targets,
            weight,
            token_weights,
            loss=losses,
            z_loss=z_losses,
            lse=flat(lse),
            target_logit=flat(target_logit),
            predicted_tokens=flat(predicted_tokens),
            entropy=flat(entropy),
            gradient=False,
            plan=plan,
        )
        sums = (loss, z_loss, total_weight)
        V = call.logits.shape[-1]
        reduce(call, V, losses, z_losses, targets, weight, token_weights, *sums)

    @library.kernel("cross_entropy_backward", device, module=module)
    def cross_entropy_backward(call, dlogits, plan):
        reduction = (call.lse, call.total_weight, call.num_items_in_batch, call.reduction)
        dloss, dz_loss = (upstream(grad, *reduction) for grad in (call.dloss, call.dz_loss))
        grads = (dloss, dz_loss, call.dlse, call.dtarget_logit)
        gradient(
            call,
            # They may have any stride, 0 too.
            *(None if grad is None else grad.reshape(-1) for grad in grads),
            rows(call.logits),
            *map(flat, (call.target, call.weight, call.token_weight, call.lse)),
            dlogits.view(-1, call.logits.shape[-1]),
            plan,
        )
