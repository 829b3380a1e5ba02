"""Cross-entropy of logits, and of the logits of a linear head, as modules."""

from __future__ import annotations

import inspect
from numbers import Real
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from ..ops.heads.head import cast_as_linear, needed_gradients
from ..ops.heads.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_forward
from ..ops.heads.lora import lora_input
from ..ops.losses.cross_entropy import cross_entropy, cross_entropy_forward
from .derived import documented, no_rows, no_target

__all__ = ["CrossEntropyLoss", "CrossEntropyOutput", "LinearCrossEntropyLoss"]


class CrossEntropyOutput(NamedTuple):
    """The output of a loss module that returns more than the loss. Fields not requested are None.

    loss and z_loss are differentiable. token_accuracy is a scalar: the share of the tokens that are
    not ignored whose predicted class is the target; NaN if all are ignored. predicted_tokens and
    entropy have the shape of target.
    """

    loss: Tensor
    z_loss: Tensor | None = None
    token_accuracy: Tensor | None = None
    predicted_tokens: Tensor | None = None
    entropy: Tensor | None = None


@documented(cross_entropy, input="logits")
class CrossEntropyLoss(nn.CrossEntropyLoss):
    """`torch.nn.CrossEntropyLoss` for logits with the classes in the last dimension.

    Probabilities of classes as the target are not supported.

    Args:
        size_average, reduce: deprecated, as for `torch.nn.CrossEntropyLoss`.
        num_items_in_batch: the divisor of the mean: a number, a tensor of one number, or None.
        return_z_loss, return_token_accuracy, return_predicted_tokens, return_entropy: whether to
            return each of these with the loss, in a `CrossEntropyOutput`.

    Returns:
        The loss: (), or target's shape for the reduction "none"; float32, or float64 if input is.

    Example:
        >>> liger_ops.nn.CrossEntropyLoss()(torch.zeros(2, 4), torch.tensor([3, -100]))
        tensor(1.3863)
    """

    _shown: ClassVar[tuple[str, ...]] = (
        "ignore_index", "reduction", "label_smoothing", "lse_square_scale", "softcap", "logit_scale"
    )  # fmt: skip

    def __init__(
        self, weight: Tensor | None = None, size_average: bool | None = None,
        ignore_index: int = -100, reduce: bool | None = None, reduction: str = "mean",
        label_smoothing: float = 0.0, *,
        lse_square_scale: float = 0.0, softcap: float | None = None, logit_scale: float = 1.0,
        return_z_loss: bool = False, return_token_accuracy: bool = False,
        return_predicted_tokens: bool = False, return_entropy: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(weight, size_average, ignore_index, reduce, reduction, label_smoothing)
        self.lse_square_scale, self.softcap = lse_square_scale, softcap
        self.logit_scale = logit_scale
        self.return_z_loss, self.return_entropy = return_z_loss, return_entropy
        self.return_token_accuracy = return_token_accuracy
        self.return_predicted_tokens = return_predicted_tokens
        # Raises the op's own errors for wrong options now, not at the first forward.
        cross_entropy(no_rows(), no_target(), None, None, None, *self._options)

    def forward(  # type: ignore[override]
        self, input: Tensor, target: Tensor, token_weight: Tensor | None = None,
        num_items_in_batch: Tensor | float | None = None,
    ) -> Tensor | CrossEntropyOutput:  # fmt: skip
        items = items_on(input.device, num_items_in_batch)
        arguments: tuple[Any, ...] = (input, target, self.weight, token_weight, items)
        arguments = (*arguments, *self._options, self.wants_predicted, self.return_entropy)
        return self._output(target, cross_entropy_forward(*arguments))

    @property
    def _options(self) -> tuple[Any, ...]:
        """The options of both loss ops, in the order of their arguments."""
        return (
            self.ignore_index, self.reduction, self.label_smoothing,
            self.lse_square_scale, self.softcap, self.logit_scale,
        )  # fmt: skip

    @property
    def wants_predicted(self) -> bool:
        return self.return_predicted_tokens or self.return_token_accuracy

    @property
    def has_parts(self) -> bool:
        """True if the result is a CrossEntropyOutput, and not the loss alone."""
        return self.return_z_loss or self.wants_predicted or self.return_entropy

    def _output(self, target: Tensor, outputs: tuple[Any, ...]) -> Tensor | CrossEntropyOutput:
        loss, z_loss, _, _, _, predicted_tokens, entropy, *_ = outputs
        if not self.has_parts:
            return loss
        accuracy = None
        if self.return_token_accuracy and predicted_tokens is not None:
            accuracy = token_accuracy(predicted_tokens, target, self.ignore_index)
        return CrossEntropyOutput(
            loss,
            z_loss if self.return_z_loss else None,
            accuracy,
            predicted_tokens if self.return_predicted_tokens else None,
            entropy,
        )

    def extra_repr(self) -> str:
        """Show the options that differ from their defaults."""
        defaults = inspect.signature(type(self)).parameters
        return ", ".join(
            f"{name}={getattr(self, name)!r}"
            for name in self._shown
            if getattr(self, name) != defaults[name].default
        )


@documented(linear_cross_entropy)
class LinearCrossEntropyLoss(CrossEntropyLoss):
    """Cross-entropy of the logits of a linear head, which are computed in chunks and not kept.

    The head is an argument of each call, so it may share its weight with an embedding;
    `torch.nn.LinearCrossEntropyLoss` owns its head instead.

    Args:
        weight: in the constructor, the op's `class_weight`, (V,); in the forward, the head's
            weight, (V, D), of x's dtype.
        size_average, reduce: deprecated, as for `torch.nn.CrossEntropyLoss`.
        num_items_in_batch: the divisor of the mean: a number, a tensor of one number, or None.
        return_z_loss, return_token_accuracy, return_predicted_tokens, return_entropy: as for
            `CrossEntropyLoss`.

    Example:
        >>> head = torch.nn.Linear(8, 4, bias=False)
        >>> loss = liger_ops.nn.LinearCrossEntropyLoss()
        >>> loss(torch.zeros(2, 8), head.weight, torch.tensor([3, -100]))
        tensor(1.3863, grad_fn=<...>)
    """

    _shown = (*CrossEntropyLoss._shown, "accum_dtype", "chunk_bytes")

    def __init__(
        self, weight: Tensor | None = None, size_average: bool | None = None,
        ignore_index: int = -100, reduce: bool | None = None, reduction: str = "mean",
        label_smoothing: float = 0.0, *,
        lse_square_scale: float = 0.0, softcap: float | None = None, logit_scale: float = 1.0,
        return_z_loss: bool = False, return_token_accuracy: bool = False,
        return_predicted_tokens: bool = False, return_entropy: bool = False,
        accum_dtype: torch.dtype | None = None, chunk_bytes: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(
            weight, size_average, ignore_index, reduce, reduction, label_smoothing,
            lse_square_scale=lse_square_scale, softcap=softcap, logit_scale=logit_scale,
            return_z_loss=return_z_loss, return_token_accuracy=return_token_accuracy,
            return_predicted_tokens=return_predicted_tokens, return_entropy=return_entropy,
        )  # fmt: skip
        if chunk_bytes is not None and chunk_bytes < 1:
            raise ValueError(
                f"LinearCrossEntropyLoss: chunk_bytes must be above 0 or None, got {chunk_bytes}"
            )
        self.accum_dtype = accum_dtype
        self.chunk_bytes = chunk_bytes

    def forward(  # type: ignore[override]
        self, x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None,
        token_weight: Tensor | None = None, num_items_in_batch: Tensor | float | None = None,
        lora_a: Tensor | None = None, lora_b: Tensor | None = None, lora_scale: float = 1.0,
    ) -> Tensor | CrossEntropyOutput:  # fmt: skip
        items = items_on(x.device, num_items_in_batch)
        options: tuple[Any, ...] = (self.weight, token_weight, items, *self._options)
        options = (*options, self.accum_dtype, self.chunk_bytes)
        if not self.has_parts:
            lora: tuple[Any, ...] = (lora_a, lora_b, lora_scale)
            return linear_cross_entropy(x, weight, target, bias, *options, *lora)
        x, weight, bias = cast_as_linear(x, weight, bias)
        lora_x, lora_b = lora_input("linear_cross_entropy", x, weight, lora_a, lora_b, lora_scale)
        mask = needed_gradients((x, weight, bias, lora_x, lora_b), self.reduction)
        options = (*options, self.wants_predicted, self.return_entropy, mask, lora_x, lora_b)
        outputs = linear_cross_entropy_forward(x, weight, target, bias, *options)
        return self._output(target, outputs)


def items_on(device: torch.device, num_items_in_batch: Tensor | float | None) -> Tensor | None:
    """Return num_items_in_batch as a tensor on the device, without waiting for the device."""
    if num_items_in_batch is None:
        return None
    if isinstance(num_items_in_batch, Tensor):
        return num_items_in_batch.to(device, non_blocking=True)
    if not isinstance(num_items_in_batch, Real):
        raise TypeError(
            "cross_entropy: num_items_in_batch must be a number or a tensor of one, got"
            f" {type(num_items_in_batch).__name__}"
        )
    return torch.full((), num_items_in_batch, dtype=torch.float32, device=device)


def token_accuracy(predicted_tokens: Tensor, target: Tensor, ignore_index: int) -> Tensor:
    """Return the share of the tokens that are not ignored whose prediction is the target."""
    kept = target != ignore_index
    return ((predicted_tokens == target) & kept).sum() / kept.sum()
