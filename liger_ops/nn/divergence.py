"""The divergence of a student's distribution from its teacher's, as a module."""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops.losses.divergence import divergence
from .log_prob import WithOptions

DEFAULTS = {
    "kind": "jsd", "beta": 0.5, "temperature": 1.0, "teacher_temperature": None,
    "ignore_index": -100,
}  # fmt: skip


class Divergence(WithOptions):
    """The divergence of a student's distribution from its teacher's, for each token.

    Calls `liger_ops.divergence`; see there for equations, precision and gradient.

    Args:
        kind, beta, temperature, teacher_temperature, ignore_index: as for `liger_ops.divergence`.

    Shape:
        student_logits, teacher_logits: (..., V), floating point, any strides.
        target: (...), int64 or int32, or None.
        The divergence: (...), float32; float64 for float64 logits.

    Raises:
        TypeError, ValueError: see `liger_ops.divergence`.

    Example:
        >>> student, teacher = torch.zeros(1, 2), torch.tensor([[0.0, -torch.inf]])
        >>> liger_ops.nn.Divergence("forward_kl")(student, teacher)
        tensor([0.6931])
    """

    def __init__(
        self, kind: str = "jsd", beta: float = 0.5, temperature: float = 1.0,
        teacher_temperature: float | None = None, ignore_index: int = -100,
    ) -> None:  # fmt: skip
        super().__init__(DEFAULTS, (kind, beta, temperature, teacher_temperature, ignore_index))
        # Raises the op's own errors for wrong options now, not at the first forward.
        empty = torch.empty(0, 1, device="meta")
        self(empty, empty)

    def forward(
        self, student_logits: Tensor, teacher_logits: Tensor, target: Tensor | None = None
    ) -> Tensor:
        options = {name: getattr(self, name) for name in DEFAULTS}
        return divergence(student_logits, teacher_logits, target=target, **options)
