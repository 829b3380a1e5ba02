"""Modules that normalise by the root mean square."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..ops.fused_add_rms_norm import fused_add_rms_norm
from ..ops.rms_norm import rms_norm
from .checks import check_size


class _RMSNormBase(nn.Module):
    """The weight and the options of the two modules that normalise by the root mean square."""

    weight: nn.Parameter | None

    def __init__(
        self,
        hidden_size: int | None,
        eps: float = 1e-6,
        offset: float = 0.0,
        casting_mode: str = "llama",
        elementwise_affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
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
        self.eps = eps
        self.offset = offset
        self.casting_mode = casting_mode
        self.elementwise_affine = elementwise_affine
        self.register_parameter("weight", weight)
        self._check_options()
        self.reset_parameters()

    def _check_options(self) -> None:
        """Raise now, not at the first forward, what the op says of the options."""
        nothing = torch.empty(0, 1, device="meta")
        weight = torch.empty(1, device="meta") if self.elementwise_affine else None
        rms_norm(nothing, weight, self.eps, self.offset, self.casting_mode)

    def _check_width(self, x: Tensor) -> None:
        # With a weight the op compares its size.
        if self.weight is None and self.hidden_size not in (None, x.shape[-1]):
            raise ValueError(
                f"{type(self).__name__}: x must be (..., {self.hidden_size}),"
                f" got shape {tuple(x.shape)}"
            )

    def reset_parameters(self) -> None:
        """Make weight + offset one."""
        if self.weight is not None:
            nn.init.constant_(self.weight, 1.0 - self.offset)

    def extra_repr(self) -> str:
        return (
            f"{self.hidden_size}, eps={self.eps}, offset={self.offset},"
            f" casting_mode={self.casting_mode!r}, elementwise_affine={self.elementwise_affine}"
        )


class RMSNorm(_RMSNormBase):
    """Root-mean-square normalisation over the last dimension, by `liger_ops.rms_norm`.

        y = x / sqrt(mean(x**2, -1) + eps) * (weight + offset)

    Where the result is rounded, the precision and the gradient are those of `liger_ops.rms_norm`. y
    has x's dtype, whatever weight's.

    Args:
        hidden_size: the size N of the last dimension. None, for any, without a weight only.
        eps: added to the mean square, at least 0.
        offset: added to the weight: 1.0 for models that store weight - 1 (Gemma), else 0.
        casting_mode: "llama", "gemma" or "none": see `liger_ops.rms_norm`.
        elementwise_affine: whether there is a weight.
        device, dtype: of the weight.

    Attributes:
        weight: (N,), or None. It starts as 1 - offset.

    Shape:
        x: (..., N), floating point, any strides; y: the same, contiguous.

    Raises:
        TypeError: an argument is of another type, or x is not floating point.
        ValueError: hidden_size is not positive, an option is not as above, or x is of another
            width.

    Example:
        >>> liger_ops.nn.RMSNorm(2, elementwise_affine=False)(torch.tensor([[3.0, 4.0]]))
        tensor([[0.8485, 1.1314]])
    """

    def forward(self, x: Tensor) -> Tensor:
        self._check_width(x)
        return rms_norm(x, self.weight, self.eps, self.offset, self.casting_mode)


class FusedAddRMSNorm(_RMSNormBase):
    """Residual addition and root-mean-square normalisation, by `liger_ops.fused_add_rms_norm`.

        s = x + residual
        y = s / sqrt(mean(s**2, -1) + eps) * (weight + offset)

    For a block that normalises the sum and passes it on: the sum is written once, and its own
    gradient joins the norm's in one kernel. Precision and gradient are those of
    `liger_ops.fused_add_rms_norm`.

    Args:
        hidden_size: the size N of the last dimension. None, for any, without a weight only.
        eps: added to the mean square, at least 0.
        offset: added to the weight: 1.0 for models that store weight - 1 (Gemma), else 0.
        casting_mode: "llama", "gemma" or "none": see `liger_ops.rms_norm`.
        elementwise_affine: whether there is a weight.
        device, dtype: of the weight.

    Attributes:
        weight: (N,), or None. It starts as 1 - offset.

    Shape:
        x, residual: (..., N), floating point, any strides; y and s: the same, contiguous, of the
            dtype of x + residual.

    Raises:
        TypeError: an argument is of another type, or x or residual is not floating point.
        ValueError: hidden_size is not positive, an option is not as above, or x is of another width
            than hidden_size, or of another shape than residual.

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
