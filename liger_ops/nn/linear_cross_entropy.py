"""The cross-entropy of a linear layer's logits, as a module."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..ops.heads.head import cast_as_linear, needed_gradients
from ..ops.heads.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_forward
from ..ops.heads.lora import lora_input
from .cross_entropy import CrossEntropyLoss, CrossEntropyOutput, items_on


class LinearCrossEntropyLoss(CrossEntropyLoss):
    """Cross-entropy of the logits of a linear head, computed in chunks without keeping the logits.

    Calls `liger_ops.linear_cross_entropy`; see there for equations, precision, gradient, and for
    the size of a chunk (all rows, if that takes no more memory than several chunks).

    The head is an argument of each call, so it may share its weight with an embedding;
    `torch.nn.LinearCrossEntropyLoss` owns its head instead.

    Args:
        weight: (V,), the weight of each class: `class_weight` of the op.
        ignore_index, reduction, label_smoothing, lse_square_scale, softcap, logit_scale,
            return_z_loss, return_token_accuracy, return_predicted_tokens, return_entropy, and the
            deprecated size_average and reduce: as for `CrossEntropyLoss`.
        accum_dtype, chunk_bytes: as for `liger_ops.linear_cross_entropy`.

    Shape:
        x: (..., D), floating point, any strides.
        weight: (V, D), in x's dtype: the weight of the head, not of the classes.
        target: (...), int64 or int32.
        bias: (V,), in x's dtype, or None: the bias of the head.
        token_weight: (...), or None.
        num_items_in_batch: the divisor of the mean: a number, a tensor of one number, or None.
        lora_a, lora_b, lora_scale: (R, D), (V, R) and a number: a LoRA of the head, or None.
        The loss: (), or (...) for the reduction "none"; float64 for float64 x, else float32.

    Raises:
        TypeError, ValueError, IndexError: see `liger_ops.linear_cross_entropy`.

    Example:
        >>> head = torch.nn.Linear(8, 4, bias=False)
        >>> loss = liger_ops.nn.LinearCrossEntropyLoss()
        >>> loss(torch.zeros(2, 8), head.weight, torch.tensor([3, -100]))
        tensor(1.3863, grad_fn=<...>)
    """

    def __init__(
        self, *args: Any, accum_dtype: torch.dtype | None = None,
        chunk_bytes: int | None = None, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(*args, **options)
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
        mask = needed_gradients(x, weight, bias, self.reduction, lora_x, lora_b)
        options = (*options, self.wants_predicted, self.return_entropy, mask, lora_x, lora_b)
        outputs = linear_cross_entropy_forward(x, weight, target, bias, *options)
        loss, z_loss, _, _, _, predicted_tokens, entropy, *_ = outputs
        return self._output(target, loss, z_loss, predicted_tokens, entropy)

    def extra_repr(self) -> str:
        given = [super().extra_repr()]
        given += [
            f"{name}={getattr(self, name)!r}"
            for name in ("accum_dtype", "chunk_bytes")
            if getattr(self, name) is not None
        ]
        return ", ".join(part for part in given if part)
