"""Compute the loss of a language model, from hidden states and its head or from logits."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ...nn.cross_entropy import token_accuracy
from ...ops.heads.head import cast_as_linear, needed_gradients
from ...ops.heads.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_forward
from ...ops.heads.lora import narrowed
from ...ops.losses.cross_entropy import cross_entropy_forward
from ..lora.head import LoraHead
from ..tensor_parallel import as_input
from .deferral import Deferral
from .options import HEAD_OPTIONS, LOSS_OPTIONS, ForwardLossOptions

# The result of `LossSource.results`: loss, z_loss, lse, target_logit, and predicted_tokens, which
# are None unless they are asked for.
Results = tuple[Tensor, Tensor, Tensor, Tensor, "Tensor | None"]


class LossSource(Protocol):
    """The tensors from which a loss is computed. `tokens` is the shape of a value per token."""

    tokens: tuple[int, ...]

    def loss(self, target: Tensor, **options: Any) -> Tensor: ...

    def results(self, target: Tensor, **options: Any) -> Results: ...

    def probability(self, target: Tensor, ignore_index: int) -> Tensor:
        """Return the probability of each token's target."""
        _, _, lse, target_logit, _ = self.results(
            target, reduction="none", ignore_index=ignore_index
        )
        return torch.exp(target_logit - lse)


def _head_options(logits: Deferral, options: ForwardLossOptions) -> dict[str, Any]:
    """Return the options of an op that computes a loss from a head."""
    transform = logits.transform
    return {
        "softcap": transform.softcap,
        "logit_scale": transform.logit_scale,
        **options.select(HEAD_OPTIONS),
    }


class HeadLoss(LossSource):
    """The loss of hidden states and a head."""

    def __init__(
        self, logits: Deferral, hidden: Tensor,
        head: nn.Linear | LoraHead, options: ForwardLossOptions,
    ) -> None:  # fmt: skip
        self.tokens = logits.tokens
        # Hooks that gather the weight may have cast the hidden states: their rows are chosen again.
        rows = logits.hidden if hidden is logits.call.hidden else logits.rows_of(hidden)
        self.x = rows.reshape(-1, hidden.shape[-1])
        self.weight = head.weight
        self.bias: Tensor | None = head.bias
        if logits.transform.bias is not None:
            class_bias = logits.transform.bias.to(head.weight.dtype)
            self.bias = class_bias if head.bias is None else head.bias + class_bias
        # Computed once for all results, because the LoRA may have a dropout, which draws a mask.
        self.lora_x: Tensor | None = None
        self.lora_b: Tensor | None = None
        if isinstance(head, LoraHead):
            lora_x, self.lora_b = head.lora(hidden)
            self.lora_x = logits.rows_of(lora_x).reshape(-1, lora_x.shape[-1])
        self.options = _head_options(logits, options)

    def loss(self, target: Tensor, **options: Any) -> Tensor:
        if self.lora_x is not None:
            return self.results(target, **options)[0]
        options = {**self.options, **options}
        return linear_cross_entropy(self.x, self.weight, target, self.bias, **options)

    def results(self, target: Tensor, **options: Any) -> Results:
        x, weight, bias = cast_as_linear(self.x, self.weight, self.bias)
        lora_x = lora_b = None
        if self.lora_x is not None and self.lora_b is not None:
            lora_x, lora_b = narrowed(self.lora_x, self.lora_b, x.dtype)
        loss, z_loss, lse, target_logit, _, predicted, *_ = linear_cross_entropy_forward(
            x,
            weight,
            target,
            bias,
            **self.options,
            **options,
            gradient_mask=needed_gradients((x, weight, bias, lora_x, lora_b), options["reduction"]),
            lora_x=lora_x,
            lora_b=lora_b,
        )
        return loss, z_loss, lse, target_logit, predicted


class ShardedHeadLoss(LossSource):
    """The loss of hidden states and a head that is sharded over words."""

    def __init__(
        self, logits: Deferral, hidden: Tensor,
        head: nn.Linear | LoraHead, options: ForwardLossOptions,
    ) -> None:  # fmt: skip
        layer = head.base if isinstance(head, LoraHead) else head
        self.x, self.weight, self.bias = as_input(layer, hidden), head.weight, head.bias
        self.tokens = tuple(self.x.shape[:-1])
        self.lora: tuple[Tensor, Tensor] | None = None
        if isinstance(head, LoraHead):
            self.lora = head.lora_over_words(hidden, self.x)
        self.options = _head_options(logits, options)

    def loss(self, target: Tensor, **options: Any) -> Tensor:
        from ...distributed.process_group.cross_entropy import of_head

        # A DTensor with sharded rows cannot be flattened.
        options = {**self.options, **options}
        if options.get("token_weight") is not None:
            options["token_weight"] = options["token_weight"].reshape(self.tokens)
        head = self.x, self.weight, self.bias, *(self.lora or (None, None))
        loss = of_head(head, target.reshape(self.tokens), **options)
        return loss.reshape(target.shape) if loss.dim() else loss

    def results(self, target: Tensor, **options: Any) -> Results:
        raise NotImplementedError("a head that is sharded over words returns the loss alone")

    def probability(self, target: Tensor, ignore_index: int) -> Tensor:
        return torch.exp(-self.loss(target, reduction="none", ignore_index=ignore_index))


class LogitsLoss(LossSource):
    """The loss of computed logits, which are scaled and capped already."""

    def __init__(self, logits: Deferral) -> None:
        assert logits.value is not None
        self.tokens, self.logits = logits.tokens, logits.value

    def loss(self, target: Tensor, **options: Any) -> Tensor:
        return self.results(target, **options)[0]

    def results(self, target: Tensor, **options: Any) -> Results:
        loss, z_loss, lse, target_logit, _, predicted, *_ = cross_entropy_forward(
            self.logits, target, **options
        )
        return loss, z_loss, lse, target_logit, predicted


def loss_of(
    source: LossSource, target: Tensor, model_options: dict[str, Any], options: ForwardLossOptions
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss, and the further values that the options ask for, by name.

    Token scaling multiplies each token's loss by the probability of its target, as a constant; the
    mean still divides by the number of tokens.

    Args:
        source: the tensors from which the loss is computed.
        target: the labels, one per token, in one dimension.
        model_options: ignore_index, reduction and label_smoothing of the model's own
            cross_entropy. The options replace them where they differ from the defaults.
        options: the options of the call.
    """
    ignore_index, asked = model_options["ignore_index"], options.asked
    arguments: dict[str, Any] = {**model_options, **options.select(LOSS_OPTIONS)}
    reduction = arguments["reduction"]
    if "use_token_scaling" in asked:
        with torch.no_grad():
            arguments["token_weight"] = source.probability(target, ignore_index)
            if reduction == "mean":
                arguments["num_items_in_batch"] = (target != ignore_index).sum()
    is_per_token = reduction == "none" and "reduction" in asked

    def shaped(value: Tensor) -> Tensor:
        return value.reshape(source.tokens) if is_per_token else value

    if not options.has_parts:
        return shaped(source.loss(target, **arguments)), {}
    arguments["return_predicted"] = options.wants_predicted
    loss, z_loss, _, _, predicted = source.results(target, **arguments)
    extra = {}
    if predicted is not None and "return_token_accuracy" in asked:
        extra["token_accuracy"] = token_accuracy(predicted, target, ignore_index)
    if predicted is not None and "return_predicted_tokens" in asked:
        extra["predicted_tokens"] = predicted.reshape(source.tokens)
    if "return_z_loss" in asked:
        if reduction == "sum" and options.num_items is not None:
            items = options.num_items
            z_loss = z_loss / (items.to(z_loss.device) if isinstance(items, Tensor) else items)
        extra["z_loss"] = shaped(z_loss)
    return shaped(loss), extra
