"""Root-mean-square normalisation, as modules."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..ops.norms.fused_add_rms_norm import fused_add_rms_norm
from ..ops.norms.rms_norm import rms_norm
from .checks import check_size


class OptionalWeight(nn.Module):
    """What the modules of a norm with an optional weight share."""

    weight: nn.Parameter | None

    def __init__(
        self, hidden_size: int | None, elementwise_affine: bool,
        device: torch.device | str | None, dtype: torch.dtype | None,
    ) -> None:  # fmt: skip
        super().__init__()
        owner = type(self).__name__
        weight = None
        if hidden_size is not None:
            check_size(owner, "hidden_size", hidden_size)
            if elementwise_affine:
                weight = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        elif elementwise_affine:
            raise ValueError(f"{owner}: hidden_size must be a positive int, got None")
        self.hidden_size = hidden_size
        self.elementwise_affine = elementwise_affine
        self.register_parameter("weight", weight)

    def _check_width(self, x: Tensor) -> None:
        # With a weight the op itself checks the width.
        if self.weight is None and self.hidden_size not in (None, x.shape[-1]):
            raise ValueError(
                f"{type(self).__name__}: x must be (..., {self.hidden_size}),"
                f" got shape {tuple(x.shape)}"
            )


class RMSNormBase(OptionalWeight):
    """The options that RMSNorm, FusedAddRMSNorm and ModulatedRMSNorm share."""

    def __init__(
        self, hidden_size: int | None, eps: float = 1e-6, offset: float = 0.0,
        casting_mode: str = "llama", elementwise_affine: bool = True,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__(hidden_size, elementwise_affine, device, dtype)
        self.eps = eps
        self.offset = offset
        self.casting_mode = casting_mode
        self._check_options()
        self.reset_parameters()

    def _check_options(self) -> None:
        """Raise the op's own errors for wrong options now, not at the first forward."""
        nothing = torch.empty(0, 1, device="meta")
        weight = torch.empty(1, device="meta") if self.elementwise_affine else None
        rms_norm(nothing, weight, self.eps, self.offset, self.casting_mode)

    def reset_parameters(self) -> None:
        """Initialise the weight so that weight + offset is 1."""
        if self.weight is not None:
            nn.init.constant_(self.weight, 1.0 - self.offset)

    def extra_repr(self) -> str:
        return (
            f"{self.hidden_size}, eps={self.eps}, offset={self.offset},"
            f" casting_mode={self.casting_mode!r}, elementwise_affine={self.elementwise_affine}"
        )


class RMSNorm(RMSNormBase):
    """Root-mean-square normalisation over the last dimension. Calls `liger_ops.rms_norm`.

        y = x / sqrt(mean(x**2, -1) + eps) * (weight + offset)

    See `liger_ops.rms_norm` for rounding, precision and gradient. y has x's dtype, whatever the
    dtype of weight.

    Args:
        hidden_size: the size N of the last dimension; None for any size, only without a weight.
        eps: added to the mean square, at least 0.
        offset: added to the weight: 1.0 for models that store weight - 1 (Gemma), else 0.
        casting_mode: "llama", "gemma" or "none": see `liger_ops.rms_norm`.
        elementwise_affine: whether the module has a weight.
        device, dtype: of the weight.

    Attributes:
        weight: (N,), or None. It starts as 1 - offset.

    Shape:
        x: (..., N), floating point, any strides; y: the same, contiguous.

    Raises:
        TypeError: an argument has another type, or x is not floating point.
        ValueError: hidden_size is not positive, an option is not as above, or x has another width.

    Example:
        >>> liger_ops.nn.RMSNorm(2, elementwise_affine=False)(torch.tensor([[3.0, 4.0]]))
        tensor([[0.8485, 1.1314]])
    """

    def forward(self, x: Tensor) -> Tensor:
        self._check_width(x)
        return rms_norm(x, self.weight, self.eps, self.offset, self.casting_mode)


class FusedAddRMSNorm(RMSNormBase):
    """Residual addition, then root-mean-square normalisation. Calls `fused_add_rms_norm`.

        s = x + residual
        y = s / sqrt(mean(s**2, -1) + eps) * (weight + offset)

    For a block that normalises the sum and also passes it on: the sum is written once, and one
    kernel adds its own gradient to the norm's. See `liger_ops.fused_add_rms_norm` for precision and
    gradient.

    Args:
        hidden_size: the size N of the last dimension; None for any size, only without a weight.
        eps: added to the mean square, at least 0.
        offset: added to the weight: 1.0 for models that store weight - 1 (Gemma), else 0.
        casting_mode: "llama", "gemma" or "none": see `liger_ops.rms_norm`.
        elementwise_affine: whether the module has a weight.
        device, dtype: of the weight.

    Attributes:
        weight: (N,), or None. It starts as 1 - offset.

    Shape:
        x, residual: (..., N), floating point, any strides; y and s: the same, contiguous, of the
            dtype of x + residual.

    Raises:
        TypeError: an argument has another type, or x or residual is not floating point.
        ValueError: hidden_size is not positive, an option is not as above, x does not have
            the width hidden_size, or x and residual differ in shape.

    Example:
        >>> y, s = liger_ops.nn.FusedAddRMSNorm(2)(torch.ones(1, 2), torch.tensor([[2.0, 3.0]]))
        >>> s.tolist()
        [[3.0, 4.0]]
    """

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        self._check_width(x)
        return fused_add_rms_norm(
            x, residual, self.weight, self.eps, self.offset, self.casting_mode
        )
