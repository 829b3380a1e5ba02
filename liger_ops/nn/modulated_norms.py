"""Norms with an adaptive scale and shift, as modules."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..ops.norms.modulated_layer_norm import modulated_layer_norm
from ..ops.norms.modulated_rms_norm import modulated_rms_norm
from .rms_norm import OptionalWeight, RMSNormBase


class ModulatedRMSNorm(RMSNormBase):
    """Root-mean-square normalisation with an adaptive scale and shift. Calls `modulated_rms_norm`.

        y = norm(x) * (1 + scale) + shift
        norm(x) = x / sqrt(mean(x**2, -1) + eps) * (weight + offset)

    See `liger_ops.modulated_rms_norm` for rounding, precision and gradient. y has x's dtype,
    whatever the dtypes of weight, scale and shift.

    Args:
        hidden_size: the size N of the last dimension; None for any size, only without a weight.
        eps: added to the mean square, at least 0.
        offset: added to the weight: 1.0 for models that store weight - 1, else 0.
        casting_mode: "llama", "gemma", "none" or "float32": see `liger_ops.modulated_rms_norm`.
        elementwise_affine: whether the module has a weight.
        device, dtype: of the weight.

    Attributes:
        weight: (N,), or None. It starts as 1 - offset.

    Shape:
        x: (..., N), floating point, any strides; y: the same, contiguous.
        scale, shift: (N,), (B, N) for the samples of an x of (B, ..., N), or of x's shape.

    Raises:
        TypeError: an argument has another type, or a tensor is not floating point.
        ValueError: hidden_size is not positive, an option is not as above, x has another width, or
            scale or shift has another shape.

    Example:
        >>> norm = liger_ops.nn.ModulatedRMSNorm(2, elementwise_affine=False)
        >>> norm(torch.tensor([[3.0, 4.0]]), torch.tensor([1.0, 0.0]))
        tensor([[1.6971, 1.1314]])
    """

    def _check_options(self) -> None:
        nothing = torch.empty(0, 1, device="meta")
        row = torch.empty(1, device="meta")
        weight = row if self.elementwise_affine else None
        modulated_rms_norm(nothing, row, None, weight, self.eps, self.offset, self.casting_mode)

    def forward(self, x: Tensor, scale: Tensor, shift: Tensor | None = None) -> Tensor:
        self._check_width(x)
        return modulated_rms_norm(
            x, scale, shift, self.weight, self.eps, self.offset, self.casting_mode
        )


class ModulatedLayerNorm(OptionalWeight):
    """Layer normalisation with an adaptive scale and shift. Calls `modulated_layer_norm`.

        y = norm(x) * (1 + scale) + shift
        norm(x) = (x - mean(x, -1)) / sqrt(var(x, -1) + eps) * weight + bias

    See `liger_ops.modulated_layer_norm` for rounding, precision and gradient. y has x's dtype,
    whatever the dtypes of weight, bias, scale and shift. The blocks of diffusion transformers have
    neither weight nor bias, which is the default.

    Args:
        hidden_size: the size N of the last dimension; None for any size, only without parameters.
        eps: added to the variance, at least 0.
        casting_mode: "torch" or "float32": see `liger_ops.modulated_layer_norm`.
        elementwise_affine: whether the module has a weight.
        bias: whether it has a bias as well; without a weight it has none.
        device, dtype: of the parameters.

    Attributes:
        weight, bias: (N,), or None. They start as ones and zeros.

    Shape:
        x: (..., N), floating point, any strides; y: the same, contiguous.
        scale, shift: (N,), (B, N) for the samples of an x of (B, ..., N), or of x's shape.

    Raises:
        TypeError: an argument has another type, or a tensor is not floating point.
        ValueError: hidden_size is not positive, an option is not as above, x has another width, or
            scale or shift has another shape.

    Example:
        >>> norm = liger_ops.nn.ModulatedLayerNorm(2)
        >>> norm(torch.tensor([[1.0, 3.0]]), torch.tensor([1.0, 0.0]), torch.tensor([0.0, 0.5]))
        tensor([[-2.0000,  1.5000]])
    """

    bias: nn.Parameter | None

    def __init__(
        self, hidden_size: int | None, eps: float = 1e-6, casting_mode: str = "torch",
        elementwise_affine: bool = False, bias: bool = True,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__(hidden_size, elementwise_affine, device, dtype)
        self.register_parameter("bias", None)
        if bias and self.weight is not None:
            self.bias = nn.Parameter(torch.empty_like(self.weight))
        self.eps = eps
        self.casting_mode = casting_mode
        # Raises the op's own errors for wrong options now, not at the first forward.
        nothing, row = torch.empty(0, 1, device="meta"), torch.empty(1, device="meta")
        modulated_layer_norm(nothing, row, None, None, None, eps, casting_mode)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weight to 1 and the bias to 0."""
        if self.weight is not None:
            nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor, scale: Tensor, shift: Tensor | None = None) -> Tensor:
        self._check_width(x)
        return modulated_layer_norm(
            x, scale, shift, self.weight, self.bias, self.eps, self.casting_mode
        )

    def extra_repr(self) -> str:
        return (
            f"{self.hidden_size}, eps={self.eps}, casting_mode={self.casting_mode!r},"
            f" elementwise_affine={self.elementwise_affine}, bias={self.bias is not None}"
        )
