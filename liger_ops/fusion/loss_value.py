"""The loss of a causal language model, from hidden states and its head or from logits."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..nn.cross_entropy import token_accuracy
from ..ops.cross_entropy import cross_entropy_forward
from ..ops.head import cast_as_linear, needed_gradients
from ..ops.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_forward
from .loss_lora import LoraHead
from .loss_options import LossOptions
from .tensor_parallel import as_input

# Arguments of transformers' causal loss, by name.
COMPUTED = ("logits", "labels", "vocab_size", "num_items_in_batch", "ignore_index", "shift_labels")


@dataclass(frozen=True)
class CausalLoss:
    """How a language model computes its loss from hidden states.

    Its child `head`, a linear layer, computes logits. The model's attribute `loss_function`
    computes the cross-entropy of

        softcap * tanh(logits * logit_scale / softcap)

    (without softcap: of logits * logit_scale) and the labels. If `shifts`, the labels are those of
    the next token. If `takes_shift_labels`, given shift_labels are used instead. output_class is
    the class of the forward's output. Where loss_function is CrossEntropyLoss, the forward calls it
    itself, and adds_to_logits is whether the forward first adds a bias to the logits.
    """

    head: str
    loss_function: Callable[..., Any]
    logit_scale: float
    softcap: float | None
    shifts: bool = True
    takes_shift_labels: bool = True
    output_class: type | None = None
    adds_to_logits: bool = False
    # Arguments of loss_function that the op does not compute with; whether it takes any others.
    own_arguments: tuple[str, ...] = field(init=False, compare=False)
    takes_any: bool = field(init=False, compare=False)

    @property
    def written(self) -> bool:
        """Whether the model's forward itself calls CrossEntropyLoss for the loss."""
        return self.loss_function is nn.CrossEntropyLoss

    @property
    def loss_name(self) -> str:
        """The name of what the model's forward calls for its loss."""
        return "CrossEntropyLoss" if self.written else "loss_function"

    def __post_init__(self) -> None:
        parameters = inspect.signature(self.loss_function).parameters.values()
        kinds = inspect.Parameter
        names = (
            p.name for p in parameters if p.kind not in (kinds.VAR_KEYWORD, kinds.VAR_POSITIONAL)
        )
        own = () if self.written else tuple(name for name in names if name not in COMPUTED)
        object.__setattr__(self, "own_arguments", own)
        object.__setattr__(self, "takes_any", any(p.kind is p.VAR_KEYWORD for p in parameters))

    def check(self, kwargs: dict[str, Any]) -> None:
        """Raise for an argument that loss_function does not take, or that the op does not use."""
        for name in kwargs:
            if name in self.own_arguments:
                raise ValueError(
                    f"{self.loss_function.__name__}: the model's forward gives it {name}, with"
                    " which linear_cross_entropy does not compute"
                )
            if not self.takes_any:
                raise TypeError(
                    f"{self.loss_function.__name__}() got an unexpected keyword argument {name!r}"
                )

    def target(self, labels: Tensor, ignore_index: int, shift_labels: Tensor | None) -> Tensor:
        """The label for the logits of each position."""
        if shift_labels is not None and self.takes_shift_labels:
            return shift_labels
        if not self.shifts:
            return labels
        return F.pad(labels, (0, 1), value=ignore_index)[..., 1:]


# The result of either source's `results`: (loss, lse, target_logit, predicted_tokens), the last is
# None unless it is asked for.
Results = tuple[Tensor, Tensor, Tensor, "Tensor | None"]


class Source(Protocol):
    """What a loss is computed from."""

    @property
    def device(self) -> torch.device: ...

    def loss(self, target: Tensor, **options: Any) -> Tensor: ...

    def results(self, target: Tensor, **options: Any) -> Results: ...

    def probability(self, target: Tensor, ignore_index: int) -> Tensor:
        """The probability of each token's target."""
        _, lse, target_logit, _ = self.results(target, reduction="none", ignore_index=ignore_index)
        return torch.exp(target_logit - lse)


def _head_options(loss: CausalLoss, options: LossOptions) -> dict[str, Any]:
    """Options of the ops that compute a loss from a head."""
    return {
        "softcap": loss.softcap,
        "logit_scale": loss.logit_scale,
        "accum_dtype": options.accum_dtype,
        "chunk_bytes": options.chunk_bytes,
    }


class OfHidden(Source):
    """The loss, computed from hidden states and a head."""

    def __init__(
        self, hidden: Tensor,
        head: nn.Linear | LoraHead, loss: CausalLoss, options: LossOptions,
        added: Tensor | None = None,
    ) -> None:  # fmt: skip
        self.x = hidden.reshape(-1, hidden.shape[-1])
        self.weight = head.weight
        # `added` is the bias that the model adds to the logits beside the head's own.
        self.bias: Tensor | None = head.bias
        if added is not None:
            added = added.to(head.weight.dtype)
            self.bias = added if head.bias is None else head.bias + added
        # Drawn once, because dropout may come before the LoRA.
        self.lora_x: Tensor | None = None
        self.lora_b: Tensor | None = None
        if isinstance(head, LoraHead):
            lora_x, self.lora_b = head.lora(hidden)
            self.lora_x = lora_x.reshape(-1, lora_x.shape[-1])
        self.options = _head_options(loss, options)

    @property
    def device(self) -> torch.device:
        return self.x.device

    def loss(self, target: Tensor, **options: Any) -> Tensor:
        if self.lora_x is not None:
            return self.results(target, **options)[0]
        options = {**self.options, **options}
        return linear_cross_entropy(self.x, self.weight, target, self.bias, **options)

    def results(self, target: Tensor, **options: Any) -> Results:
        x, weight, bias = cast_as_linear(self.x, self.weight, self.bias)
        lora_x, lora_b = (t if t is None else t.to(x.dtype) for t in (self.lora_x, self.lora_b))
        loss, _, lse, target_logit, _, predicted, *_ = linear_cross_entropy_forward(
            x,
            weight,
            target,
            bias,
            **self.options,
            **options,
            gradient_mask=needed_gradients(x, weight, bias, options["reduction"], lora_x, lora_b),
            lora_x=lora_x,
            lora_b=lora_b,
        )
        return loss, lse, target_logit, predicted


class OfShardedHead(Source):
    """The loss, computed from hidden states and a head that is sharded over words."""

    def __init__(
        self, hidden: Tensor, head: nn.Linear | LoraHead, loss: CausalLoss, options: LossOptions
    ) -> None:
        layer = head.base if isinstance(head, LoraHead) else head
        self.x, self.weight, self.bias = as_input(layer, hidden), head.weight, head.bias
        self.lora: tuple[Tensor, Tensor] | None = None
        if isinstance(head, LoraHead):
            self.lora = head.lora_over_words(hidden, self.x)
        self.options = _head_options(loss, options)

    @property
    def device(self) -> torch.device:
        return self.x.device

    def loss(self, target: Tensor, **options: Any) -> Tensor:
        from ..distributed.vocabulary_cross_entropy import of_head

        # A DTensor with sharded rows cannot be flattened.
        options = {**self.options, **options}
        rows = self.x.shape[:-1]
        if options.get("token_weight") is not None:
            options["token_weight"] = options["token_weight"].reshape(rows)
        head = self.x, self.weight, self.bias, *(self.lora or (None, None))
        loss = of_head(head, target.reshape(rows), **options)
        return loss.reshape(target.shape) if loss.dim() else loss

    def results(self, target: Tensor, **options: Any) -> Results:
        raise NotImplementedError("a head that is sharded over words predicts no tokens")

    def probability(self, target: Tensor, ignore_index: int) -> Tensor:
        return torch.exp(-self.loss(target, reduction="none", ignore_index=ignore_index))


class OfLogits(Source):
    """The loss, computed from logits that are already scaled and capped."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits.reshape(-1, logits.shape[-1])

    @property
    def device(self) -> torch.device:
        return self.logits.device

    def loss(self, target: Tensor, **options: Any) -> Tensor:
        return self.results(target, **options)[0]

    def results(self, target: Tensor, **options: Any) -> Results:
        loss, _, lse, target_logit, _, predicted, *_ = cross_entropy_forward(
            self.logits, target, **options
        )
        return loss, lse, target_logit, predicted


def value_of(
    source: Source, target: Tensor, ignore_index: int,
    num_items_in_batch: Tensor | int | None, options: LossOptions,
) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
    """The loss, and other values that the options ask for, by name.

    Token scaling multiplies each token's loss by the probability of its target, as a constant; the
    mean still divides by the number of tokens.
    """
    labels = target.reshape(-1).to(source.device)
    items, shape = _count_of_items(num_items_in_batch, source.device)
    arguments: dict[str, Any] = {
        "num_items_in_batch": items,
        "ignore_index": ignore_index,
        "reduction": options.reduction,
        "label_smoothing": options.label_smoothing,
        "lse_square_scale": options.lse_square_scale,
    }
    if options.use_token_scaling:
        with torch.no_grad():
            arguments["token_weight"] = source.probability(labels, ignore_index)
            if items is None and options.reduction == "mean":
                arguments["num_items_in_batch"] = (labels != ignore_index).sum()
    if options.wants_predicted:
        loss, _, _, predicted = source.results(labels, **arguments, return_predicted=True)
    else:
        loss, predicted = source.loss(labels, **arguments), None
    beside = {}
    if predicted is not None and options.return_token_accuracy:
        beside["token_accuracy"] = token_accuracy(predicted, labels, ignore_index)
    if predicted is not None and options.return_predicted_tokens:
        beside["predicted_tokens"] = predicted.reshape(target.shape)
    shape = target.shape if options.reduction == "none" else shape
    # reshape is avoided if it is not needed: FSDP2 warns of outputs that are views.
    return (loss if loss.shape == shape else loss.reshape(shape)), beside


def _count_of_items(items: Tensor | int | None, device: torch.device) -> tuple[Tensor | None, Any]:
    """The divisor for the op, and the shape that dividing by `items` would give."""
    if items is None:
        return None, ()
    if not isinstance(items, Tensor):
        return torch.full((), items, device=device), ()
    # Trainer passes a (1, 1) tensor to each replica of DataParallel.
    return items.to(device).reshape(()), items.shape
