"""Log-probabilities and entropy, as a module."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..ops.log_prob import log_prob


class LogProb(nn.Module):
    """The log-probability of each token's target, and the entropy of its distribution.

    Calls `liger_ops.log_prob`; see there for equations, precision and gradient.

    Args:
        temperature, softcap, logit_scale, ignore_index: as for `liger_ops.log_prob`.

    Shape:
        logits: (..., V), floating point, any strides.
        target: (...), int64 or int32.
        The log-probability and the entropy: (...), float32; float64 for float64 logits.

    Raises:
        TypeError, ValueError, IndexError: see `liger_ops.log_prob`.

    Example:
        >>> liger_ops.nn.LogProb(temperature=0.5)(torch.zeros(2, 4), torch.tensor([3, -100]))
        (tensor([-1.3863,  0.0000]), tensor([1.3863, 0.0000]))
    """

    def __init__(
        self, temperature: float = 1.0, softcap: float | None = None,
        logit_scale: float = 1.0, ignore_index: int = -100,
    ) -> None:  # fmt: skip
        super().__init__()
        self.temperature = temperature
        self.softcap = softcap
        self.logit_scale = logit_scale
        self.ignore_index = ignore_index
        # Raises the op's own errors for wrong options now, not at the first forward.
        logits = torch.empty(0, 1, device="meta")
        log_prob(logits, torch.empty(0, dtype=torch.int64, device="meta"), *self.options)

    def forward(self, logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        return log_prob(logits, target, *self.options)

    @property
    def options(self) -> tuple[float, float | None, float, int]:
        return self.temperature, self.softcap, self.logit_scale, self.ignore_index

    def extra_repr(self) -> str:
        """The options that differ from their defaults."""
        names = ("temperature", "softcap", "logit_scale", "ignore_index")
        pairs = zip(names, self.options, (1.0, None, 1.0, -100), strict=True)
        return ", ".join(f"{name}={value!r}" for name, value, default in pairs if value != default)
