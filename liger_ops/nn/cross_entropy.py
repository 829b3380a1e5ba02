"""Cross-entropy loss, as a module."""

from __future__ import annotations

from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..ops.losses.cross_entropy import cross_entropy, cross_entropy_forward


class CrossEntropyOutput(NamedTuple):
    """The output of a loss module that returns more than the loss; fields not asked for are None.

    loss and z_loss are differentiable. token_accuracy is a scalar: the share of tokens, without the
    ignored ones, whose predicted class is the target; NaN if all are ignored. predicted_tokens and
    entropy have the shape of target.
    """

    loss: Tensor
    z_loss: Tensor | None = None
    token_accuracy: Tensor | None = None
    predicted_tokens: Tensor | None = None
    entropy: Tensor | None = None


class CrossEntropyLoss(nn.CrossEntropyLoss):
    """`torch.nn.CrossEntropyLoss` for logits with the classes in the last dimension.

    Calls `liger_ops.cross_entropy`; see there for equations, precision and gradient.

    Args:
        weight, ignore_index, reduction, label_smoothing: as for `torch.nn.CrossEntropyLoss`; also
            its deprecated size_average and reduce.
        lse_square_scale, softcap, logit_scale: as for `liger_ops.cross_entropy`.
        return_z_loss, return_token_accuracy, return_predicted_tokens, return_entropy: whether to
            return each of these with the loss, in a `CrossEntropyOutput`.

    Shape:
        input: (..., V), floating point, any strides.
        target: (...), int64 or int32. Probabilities of classes are not supported.
        token_weight: (...), or None.
        num_items_in_batch: the divisor of the mean: a number, a tensor of one number, or None.
        The loss: (), or (...) for the reduction "none"; float64 for float64 input, else float32.

    Raises:
        TypeError, ValueError, IndexError: see `liger_ops.cross_entropy`.

    Example:
        >>> liger_ops.nn.CrossEntropyLoss()(torch.zeros(2, 4), torch.tensor([3, -100]))
        tensor(1.3863)
    """

    def __init__(
        self, weight: Tensor | None = None, size_average: bool | None = None,
        ignore_index: int = -100, reduce: bool | None = None, reduction: str = "mean",
        label_smoothing: float = 0.0, *,
        lse_square_scale: float = 0.0, softcap: float | None = None, logit_scale: float = 1.0,
        return_z_loss: bool = False, return_token_accuracy: bool = False,
        return_predicted_tokens: bool = False, return_entropy: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(weight, size_average, ignore_index, reduce, reduction, label_smoothing)
        self.lse_square_scale = lse_square_scale
        self.softcap = softcap
        self.logit_scale = logit_scale
        self.return_z_loss = return_z_loss
        self.return_token_accuracy = return_token_accuracy
        self.return_predicted_tokens = return_predicted_tokens
        self.return_entropy = return_entropy
        # Raises the op's own errors for wrong options now, not at the first forward.
        logits = torch.empty(0, 1, device="meta")
        target = torch.empty(0, dtype=torch.int64, device="meta")
        cross_entropy(logits, target, None, None, None, *self._options)

    def forward(  # type: ignore[override]
        self, input: Tensor, target: Tensor, token_weight: Tensor | None = None,
        num_items_in_batch: Tensor | float | None = None,
    ) -> Tensor | CrossEntropyOutput:  # fmt: skip
        items = items_on(input.device, num_items_in_batch)
        arguments: tuple[Any, ...] = (input, target, self.weight, token_weight, items)
        arguments = (*arguments, *self._options, self.wants_predicted, self.return_entropy)
        outputs = cross_entropy_forward(*arguments)
        loss, z_loss, _, _, _, predicted_tokens, entropy, _ = outputs
        if not self.has_parts:
            return loss
        return self._output(target, loss, z_loss, predicted_tokens, entropy)

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
        """Whether the result is a CrossEntropyOutput."""
        return self.return_z_loss or self.wants_predicted or self.return_entropy

    def _output(
        self, target: Tensor, loss: Tensor, z_loss: Tensor,
        predicted_tokens: Tensor | None, entropy: Tensor | None,
    ) -> CrossEntropyOutput:  # fmt: skip
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
        """The options that differ from torch's defaults."""
        defaults = {
            "ignore_index": -100,
            "reduction": "mean",
            "label_smoothing": 0.0,
            "lse_square_scale": 0.0,
            "softcap": None,
            "logit_scale": 1.0,
        }
        return ", ".join(
            f"{name}={getattr(self, name)!r}"
            for name, default in defaults.items()
            if getattr(self, name) != default
        )


def items_on(device: torch.device, num_items_in_batch: Tensor | float | None) -> Tensor | None:
    """num_items_in_batch as a tensor on the device, without waiting for the device."""
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
    """The share of tokens, without the ignored ones, whose prediction is the target."""
    kept = target != ignore_index
    return ((predicted_tokens == target) & kept).sum() / kept.sum()
