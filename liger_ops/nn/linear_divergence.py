"""The divergence of two linear heads' distributions, as a module."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..ops.heads.linear_divergence import linear_divergence
from .log_prob import WithOptions

DEFAULTS = {
    "kind": "jsd", "beta": 0.5, "temperature": 1.0, "teacher_temperature": None,
    "student_softcap": None, "teacher_softcap": None,
    "student_logit_scale": 1.0, "teacher_logit_scale": 1.0,
    "soft_weight": 1.0, "hard_weight": 0.0, "ignore_index": -100, "reduction": "mean",
    "accum_dtype": None, "chunk_bytes": None,
}  # fmt: skip


class LinearDivergence(WithOptions):
    """The divergence of a student's head from its teacher's, mixed with the cross-entropy of
    labels, computed in chunks without keeping the logits of either.

    Calls `liger_ops.linear_divergence`; see there for equations, precision, gradient and memory.
    The heads are arguments of each call, so they may share weights with embeddings.

    Args:
        kind, beta, temperature, teacher_temperature, student_softcap, teacher_softcap,
            student_logit_scale, teacher_logit_scale, soft_weight, hard_weight, ignore_index,
            reduction, accum_dtype, chunk_bytes: as for `liger_ops.linear_divergence`.

    Shape:
        student_x: (..., D), floating point, any strides.
        student_weight: (V, D), in student_x's dtype.
        teacher_x, teacher_weight, teacher_bias: (..., E), (W, E) and (W,) or None; or in their
            place teacher_logits: (..., W).
        student_bias: (V,), in student_x's dtype, or None.
        target: (...), int64 or int32, or None.
        token_weight: (...), or None.
        num_items_in_batch: (), the divisor of the mean, or None.
        student_lora_a, student_lora_b, student_lora_scale: (R, D), (V, R) and a number: a LoRA of
            the student's head, or None; and teacher_lora_a, teacher_lora_b and teacher_lora_scale.
        The loss, the divergence and the cross-entropy, which is None without a target: (), or (...)
            for the reduction "none"; float32, or float64 if a tensor of either head is.

    Raises:
        TypeError, ValueError, IndexError: see `liger_ops.linear_divergence`.

    Example:
        >>> head = torch.nn.Linear(8, 2, bias=False)
        >>> divergence = liger_ops.nn.LinearDivergence("forward_kl")
        >>> divergence(torch.zeros(2, 8), head.weight, teacher_logits=torch.zeros(2, 2))[0]
        tensor(0., grad_fn=<...>)
    """

    def __init__(
        self, kind: str = "jsd", beta: float = 0.5, temperature: float = 1.0,
        teacher_temperature: float | None = None, *,
        student_softcap: float | None = None, teacher_softcap: float | None = None,
        student_logit_scale: float = 1.0, teacher_logit_scale: float = 1.0,
        soft_weight: float = 1.0, hard_weight: float = 0.0,
        ignore_index: int = -100, reduction: str = "mean",
        accum_dtype: torch.dtype | None = None, chunk_bytes: int | None = None,
    ) -> None:  # fmt: skip
        values = (
            kind, beta, temperature, teacher_temperature, student_softcap, teacher_softcap,
            student_logit_scale, teacher_logit_scale, soft_weight, hard_weight,
            ignore_index, reduction, accum_dtype, chunk_bytes,
        )  # fmt: skip
        super().__init__(DEFAULTS, values)
        # Raises the op's own errors for wrong options now, not at the first forward.
        x = torch.empty(0, 1, dtype=accum_dtype, device="meta")
        target = torch.empty(0, dtype=torch.int64, device="meta")
        self(x, x.new_empty(1, 1), teacher_logits=x, target=target)

    def forward(
        self, student_x: Tensor, student_weight: Tensor,
        teacher_x: Tensor | None = None, teacher_weight: Tensor | None = None,
        student_bias: Tensor | None = None, teacher_bias: Tensor | None = None,
        teacher_logits: Tensor | None = None, target: Tensor | None = None,
        token_weight: Tensor | None = None, num_items_in_batch: Tensor | None = None,
        student_lora_a: Tensor | None = None, student_lora_b: Tensor | None = None,
        student_lora_scale: float = 1.0,
        teacher_lora_a: Tensor | None = None, teacher_lora_b: Tensor | None = None,
        teacher_lora_scale: float = 1.0,
    ) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
        lora: tuple[Any, ...] = (student_lora_a, student_lora_b, student_lora_scale)
        lora = (*lora, teacher_lora_a, teacher_lora_b, teacher_lora_scale)
        return linear_divergence(
            student_x, student_weight, teacher_x, teacher_weight, student_bias, teacher_bias,
            teacher_logits, target, token_weight, num_items_in_batch, *self.options, *lora,
        )  # fmt: skip
