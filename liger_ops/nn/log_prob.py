"""Log-probabilities and entropy, as modules."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..ops.heads.linear_log_prob import linear_log_prob
from ..ops.losses.log_prob import log_prob


class WithOptions(nn.Module):
    """A module without parameters, whose attributes are an op's options, in their order."""

    def __init__(self, defaults: dict[str, Any], values: tuple[Any, ...]) -> None:
        super().__init__()
        self._defaults = defaults
        for name, value in zip(defaults, values, strict=True):
            setattr(self, name, value)

    @property
    def options(self) -> tuple[Any, ...]:
        return tuple(getattr(self, name) for name in self._defaults)

    def extra_repr(self) -> str:
        """The options that differ from their defaults."""
        pairs = zip(self._defaults.items(), self.options, strict=True)
        return ", ".join(f"{name}={value!r}" for (name, usual), value in pairs if value != usual)


DEFAULTS = {"temperature": 1.0, "softcap": None, "logit_scale": 1.0, "ignore_index": -100}


class LogProb(WithOptions):
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
        super().__init__(DEFAULTS, (temperature, softcap, logit_scale, ignore_index))
        # Raises the op's own errors for wrong options now, not at the first forward.
        self(torch.empty(0, 1, device="meta"), _no_target())

    def forward(self, logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        return log_prob(logits, target, *self.options)


class LinearLogProb(WithOptions):
    """The log-probability of each token's target, and the entropy, for the logits of a linear head,
    computed in chunks without keeping the logits.

    Calls `liger_ops.linear_log_prob`; see there for equations, precision, gradient and memory. The
    head is an argument of each call, so it may share its weight with an embedding.

    Args:
        temperature, softcap, logit_scale, ignore_index, accum_dtype, chunk_bytes: as for
            `liger_ops.linear_log_prob`.

    Shape:
        x: (..., D), floating point, any strides.
        weight: (V, D), in x's dtype.
        target: (...), int64 or int32.
        bias: (V,), in x's dtype, or None.
        lora_a, lora_b, lora_scale: (R, D), (V, R) and a number: a LoRA of the head, or None.
        The log-probability and the entropy: (...), float32; float64 for float64 x.

    Raises:
        TypeError, ValueError, IndexError: see `liger_ops.linear_log_prob`.

    Example:
        >>> head = torch.nn.Linear(8, 4, bias=False)
        >>> log_prob = liger_ops.nn.LinearLogProb(temperature=0.5)
        >>> log_prob(torch.zeros(2, 8), head.weight, torch.tensor([3, -100]))[1]
        tensor([1.3863, 0.0000], grad_fn=<...>)
    """

    def __init__(
        self, temperature: float = 1.0, softcap: float | None = None, logit_scale: float = 1.0,
        ignore_index: int = -100, *,
        accum_dtype: torch.dtype | None = None, chunk_bytes: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(
            {**DEFAULTS, "accum_dtype": None, "chunk_bytes": None},
            (temperature, softcap, logit_scale, ignore_index, accum_dtype, chunk_bytes),
        )
        x = torch.empty(0, 1, dtype=accum_dtype, device="meta")
        self(x, x.new_empty(1, 1), _no_target())

    def forward(
        self, x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None,
        lora_a: Tensor | None = None, lora_b: Tensor | None = None, lora_scale: float = 1.0,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        lora: dict[str, Any] = {"lora_a": lora_a, "lora_b": lora_b, "lora_scale": lora_scale}
        return linear_log_prob(x, weight, target, bias, *self.options, **lora)


def _no_target() -> Tensor:
    return torch.empty(0, dtype=torch.int64, device="meta")
