"""Root-mean-square normalisation with a gate, as a module."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..ops.norms.gated_rms_norm import gated_rms_norm
from .rms_norm import OptionalWeight


class GatedRMSNorm(OptionalWeight):
    """Root-mean-square normalisation before or after a gate. Calls `liger_ops.gated_rms_norm`.

        y = norm(x) * weight * activation(gate)      with norm_before_gate
        y = norm(x * activation(gate)) * weight      without it

    See `liger_ops.gated_rms_norm` for rounding, precision and gradient. y has x's dtype, whatever
    the dtypes of gate and weight.

    Args:
        hidden_size: the size N of the last dimension; None for any size, only without a weight.
        eps: added to the mean square, at least 0.
        norm_before_gate: whether x is normalised, and not x * activation(gate).
        group_size: the mean is over each group of so many neighbours; None for the last dimension.
        activation: "silu" or "sigmoid".
        casting_mode: "llama" or "gemma": see `liger_ops.gated_rms_norm`.
        elementwise_affine: whether the module has a weight.
        device, dtype: of the weight.

    Attributes:
        weight: (N,), or None. It starts as 1.

    Shape:
        x, gate: (..., N), floating point, any strides; y: the same, contiguous.

    Raises:
        TypeError: an argument has another type, or x or gate is not floating point.
        ValueError: hidden_size is not positive, an option is not as above, x has another width, or
            gate has another shape than x.

    Example:
        >>> norm = liger_ops.nn.GatedRMSNorm(2, activation="sigmoid")
        >>> norm(torch.tensor([[3.0, 4.0]]), torch.zeros(1, 2)).detach()
        tensor([[0.4243, 0.5657]])
    """

    def __init__(
        self, hidden_size: int | None, eps: float = 1e-6, norm_before_gate: bool = True,
        group_size: int | None = None, activation: str = "silu", casting_mode: str = "llama",
        elementwise_affine: bool = True,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__(hidden_size, elementwise_affine, device, dtype)
        self.eps = eps
        self.norm_before_gate = norm_before_gate
        self.group_size = group_size
        self.activation = activation
        self.casting_mode = casting_mode
        # Raises the op's own errors for wrong options now, not at the first forward.
        nothing = torch.empty(0, hidden_size or group_size or 1, device="meta")
        gated_rms_norm(nothing, nothing, None, *self._options())
        self.reset_parameters()

    def _options(self) -> tuple[float, bool, int | None, str, str]:
        return self.eps, self.norm_before_gate, self.group_size, self.activation, self.casting_mode

    def reset_parameters(self) -> None:
        """Set the weight to 1."""
        if self.weight is not None:
            nn.init.ones_(self.weight)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        self._check_width(x)
        return gated_rms_norm(x, gate, self.weight, *self._options())

    def extra_repr(self) -> str:
        return (
            f"{self.hidden_size}, eps={self.eps}, norm_before_gate={self.norm_before_gate},"
            f" group_size={self.group_size}, activation={self.activation!r},"
            f" casting_mode={self.casting_mode!r}, elementwise_affine={self.elementwise_affine}"
        )
