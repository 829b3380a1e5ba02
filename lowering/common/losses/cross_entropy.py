"""Register cross_entropy with a device's row functions.

A row function takes the op's call, for its options, and the tensors of the tokens:

    loss_and_gradient(call, logits, tokens, gradient, plan)
    gradient(call, upstream, logits, tokens, dlogits, plan)
    reduce(call, V, tokens, loss, z_loss, total_weight)

The first fills the results of each token and, if the bool `gradient` says so, writes the gradient
of the sum of the losses over the logits. The second fills dlogits. The third sums the losses of the
tokens, and checks their targets.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .... import library
from ....ops.losses.cross_entropy import upstream_of_tokens
from ..tensors import flat

# The target of a token that does not count, where only that is asked of a target.
IGNORED = -100


class TokenTensors(NamedTuple):
    """The tensors with one element per token, (M,) and contiguous, and the class weight, (V,). A
    tensor is None if it is absent or not wanted."""

    weight: Tensor | None
    target: Tensor
    token_weight: Tensor | None
    loss: Tensor | None = None
    z_loss: Tensor | None = None
    lse: Tensor | None = None
    target_logit: Tensor | None = None
    predicted_tokens: Tensor | None = None
    entropy: Tensor | None = None
    lse_error: Tensor | None = None
    # If given, the kernel fills it in place of loss, z_loss and target_logit, which are then None.
    log_prob: Tensor | None = None
    # Only with log_prob, and without a class weight or label smoothing.
    mean_logits: Tensor | None = None
    log_sum_sq_probs: Tensor | None = None

    def chunk(self, rows: slice) -> TokenTensors:
        """Return the tensors of a chunk of tokens; the class weight is that of all classes."""
        return TokenTensors(self.weight, *(None if x is None else x[rows] for x in self[1:]))


def tokens_of(call, weight, *outputs):
    """Return the tensors of a forward call's tokens; if the loss is reduced, with memory for each
    token's loss."""
    loss, z_loss, lse, target_logit, _, predicted_tokens, entropy, lse_error = outputs
    if call.reduction != "none":
        loss, z_loss = torch.empty_like(lse), torch.empty_like(lse)
    results = (loss, z_loss, lse, target_logit, predicted_tokens, entropy, lse_error)
    return TokenTensors(*map(flat, (weight, call.target, call.token_weight, *results)))


def given_tokens(call, weight):
    """Return the tensors of a backward call's tokens."""
    of_loss = map(flat, (weight, call.target, call.token_weight))
    return TokenTensors(*of_loss, lse=flat(call.lse), lse_error=flat(call.lse_error))


def loss_of_tokens(ignore_index: int, softcap: float | None, logit_scale: float) -> Any:
    """Return the options of the row functions as a call without tensors, which reduces nothing."""
    return library.OPS["cross_entropy_forward"].arguments(
        None, None,
        ignore_index=ignore_index, reduction="none", softcap=softcap, logit_scale=logit_scale,
    )  # fmt: skip


def per_token(*grads):
    """Return incoming gradients with one dimension, of any stride, also 0."""
    return [None if grad is None else grad.reshape(-1) for grad in grads]


def register(
    device: str, rows: Callable[[Tensor], Tensor], loss_and_gradient: Callable[..., None],
    gradient: Callable[..., None], reduce: Callable[..., None],
) -> None:  # fmt: skip
    """Register the row functions of a device; rows(logits) returns the logits as (M, V)."""
    module = loss_and_gradient.__module__

    @library.kernel("cross_entropy_forward", device, module=module)
    def cross_entropy_forward(call, *outputs_and_plan):
        *outputs, plan = outputs_and_plan
        tokens = tokens_of(call, call.weight, *outputs)
        loss_and_gradient(call, rows(call.logits), tokens, False, plan)
        loss, z_loss, _, _, total_weight, *_ = outputs
        reduce(call, call.logits.shape[-1], tokens, loss, z_loss, total_weight)

    @library.kernel("cross_entropy_backward", device, module=module)
    def cross_entropy_backward(call, dlogits, plan):
        grads = per_token(*upstream_of_tokens(call), None)
        tokens = given_tokens(call, call.weight)
        dlogits = dlogits.view(-1, call.logits.shape[-1])
        gradient(call, grads, rows(call.logits), tokens, dlogits, plan)
