"""The divergence of a linear head from a teacher's top k words, as a module."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..ops.heads.linear_top_k_divergence import linear_top_k_divergence
from .log_prob import WithOptions

DEFAULTS = {
    "kind": "jsd", "beta": 0.5, "tail": "bucket",
    "temperature": 1.0, "softcap": None, "logit_scale": 1.0, "ignore_index": -100,
    "accum_dtype": None, "chunk_bytes": None,
}  # fmt: skip


class LinearTopKDivergence(WithOptions):
    """The divergence of a student's head from a teacher that lists some words of each token with
    their log-probabilities, computed in chunks without keeping the logits.

    Calls `liger_ops.linear_top_k_divergence`; see there for equations, precision, gradient and
    memory. The head is an argument of each call, so it may share its weight with an embedding.

    Args:
        kind, beta, tail, temperature, softcap, logit_scale, ignore_index, accum_dtype,
            chunk_bytes: as for `liger_ops.linear_top_k_divergence`.

    Shape:
        x: (..., D), floating point, any strides.
        weight: (V, D), in x's dtype.
        teacher_ids: (..., K), int64 or int32; below 0 for an entry that is left out.
        teacher_log_prob: (..., K), floating point.
        bias: (V,), in x's dtype, or None.
        target: (...), int64 or int32, or None.
        lora_a, lora_b, lora_scale: (R, D), (V, R) and a number: a LoRA of the head, or None.
        The divergence: (...), float32; float64 for float64 x.

    Raises:
        TypeError, ValueError, IndexError: see `liger_ops.linear_top_k_divergence`.

    Example:
        >>> head = torch.nn.Linear(8, 4, bias=False)
        >>> divergence = liger_ops.nn.LinearTopKDivergence("forward_kl", tail="zero")
        >>> divergence(torch.zeros(1, 8), head.weight, torch.tensor([[3]]), torch.zeros(1, 1))
        tensor([1.3863], grad_fn=<...>)
    """

    def __init__(
        self, kind: str = "jsd", beta: float = 0.5, tail: str = "bucket",
        temperature: float = 1.0, *, softcap: float | None = None, logit_scale: float = 1.0,
        ignore_index: int = -100,
        accum_dtype: torch.dtype | None = None, chunk_bytes: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(
            DEFAULTS,
            (
                kind, beta, tail, temperature, softcap, logit_scale, ignore_index,
                accum_dtype, chunk_bytes,
            ),
        )  # fmt: skip
        # Raises the op's own errors for wrong options now, not at the first forward.
        x = torch.empty(0, 1, dtype=accum_dtype, device="meta")
        self(x, x.new_empty(1, 1), torch.empty(0, 1, dtype=torch.int64, device="meta"), x)

    def forward(
        self, x: Tensor, weight: Tensor, teacher_ids: Tensor, teacher_log_prob: Tensor,
        bias: Tensor | None = None, target: Tensor | None = None,
        lora_a: Tensor | None = None, lora_b: Tensor | None = None, lora_scale: float = 1.0,
    ) -> Tensor:  # fmt: skip
        tensors = (x, weight, teacher_ids, teacher_log_prob, bias, target)
        lora: dict[str, Any] = {"lora_a": lora_a, "lora_b": lora_b, "lora_scale": lora_scale}
        return linear_top_k_divergence(*tensors, *self.options, **lora)
