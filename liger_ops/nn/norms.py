"""Root-mean-square normalisation, as modules."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..ops.norms.fused_add_rms_norm import fused_add_rms_norm
from ..ops.norms.gated_rms_norm import gated_rms_norm
from ..ops.norms.modulated_rms_norm import modulated_rms_norm
from ..ops.norms.rms_norm import rms_norm
from .derived import check_size, documented, named, no_rows

__all__ = ["FusedAddRMSNorm", "GatedRMSNorm", "ModulatedRMSNorm", "RMSNorm"]


class OptionalWeight(nn.Module):
    """Base class of norms with an optional weight."""

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
        # With a weight, the op itself compares the widths.
        if self.weight is None and self.hidden_size not in (None, x.shape[-1]):
            raise ValueError(
                f"{type(self).__name__}: x must be (..., {self.hidden_size}),"
                f" got shape {tuple(x.shape)}"
            )


class RMSNormBase(OptionalWeight):
    """Base class of RMSNorm, FusedAddRMSNorm and ModulatedRMSNorm, with their options."""

    def __init__(
        self, hidden_size: int | None, eps: float = 1e-6, offset: float = 0.0,
        casting_mode: str = "llama", elementwise_affine: bool = True,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__(hidden_size, elementwise_affine, device, dtype)
        self.eps, self.offset, self.casting_mode = eps, offset, casting_mode
        self._check_options(torch.empty(1, device="meta") if elementwise_affine else None)
        self.reset_parameters()

    def _check_options(self, weight: Tensor | None) -> None:
        """Raise the op's own errors for wrong options now, not at the first forward."""
        rms_norm(no_rows(), weight, *self._options)

    @property
    def _options(self) -> tuple[float, float, str]:
        return self.eps, self.offset, self.casting_mode

    def reset_parameters(self) -> None:
        """Initialise the weight so that weight + offset is 1."""
        if self.weight is not None:
            nn.init.constant_(self.weight, 1.0 - self.offset)

    def extra_repr(self) -> str:
        options = named(self, "eps", "offset", "casting_mode", "elementwise_affine")
        return f"{self.hidden_size}, {options}"


@documented(rms_norm)
class RMSNorm(RMSNormBase):
    """Root-mean-square normalisation over the last dimension.

    y has x's dtype, whatever the dtype of weight.

    Attributes:
        weight: (N,), or None. It starts as 1 - offset.

    Example:
        >>> liger_ops.nn.RMSNorm(2, elementwise_affine=False)(torch.tensor([[3.0, 4.0]]))
        tensor([[0.8485, 1.1314]])
    """

    def forward(self, x: Tensor) -> Tensor:
        self._check_width(x)
        return rms_norm(x, self.weight, *self._options)


@documented(fused_add_rms_norm)
class FusedAddRMSNorm(RMSNormBase):
    """Residual addition, then root-mean-square normalisation.

    It is for a block that normalises the sum and also passes the sum on: the sum is written once,
    and in the backward one kernel adds the sum's own gradient to the norm's.

    Attributes:
        weight: (N,), or None. It starts as 1 - offset.

    Example:
        >>> y, s = liger_ops.nn.FusedAddRMSNorm(2)(torch.ones(1, 2), torch.tensor([[2.0, 3.0]]))
        >>> s.tolist()
        [[3.0, 4.0]]
    """

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        self._check_width(x)
        return fused_add_rms_norm(x, residual, self.weight, *self._options)


@documented(modulated_rms_norm)
class ModulatedRMSNorm(RMSNormBase):
    """Root-mean-square normalisation with an adaptive scale and shift.

    y has x's dtype, whatever the dtypes of weight, scale and shift.

    Attributes:
        weight: (N,), or None. It starts as 1 - offset.

    Example:
        >>> norm = liger_ops.nn.ModulatedRMSNorm(2, elementwise_affine=False)
        >>> norm(torch.tensor([[3.0, 4.0]]), torch.tensor([1.0, 0.0]))
        tensor([[1.6971, 1.1314]])
    """

    def _check_options(self, weight: Tensor | None) -> None:
        row = torch.empty(1, device="meta")
        modulated_rms_norm(no_rows(), row, None, weight, *self._options)

    def forward(self, x: Tensor, scale: Tensor, shift: Tensor | None = None) -> Tensor:
        self._check_width(x)
        return modulated_rms_norm(x, scale, shift, self.weight, *self._options)


@documented(gated_rms_norm)
class GatedRMSNorm(OptionalWeight):
    """Root-mean-square normalisation before or after a gate.

    y has x's dtype, whatever the dtypes of gate and weight.

    Attributes:
        weight: (N,), or None. It starts as 1.

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
        self.eps, self.norm_before_gate, self.group_size = eps, norm_before_gate, group_size
        self.activation, self.casting_mode = activation, casting_mode
        # Raises the op's own errors for wrong options now, not at the first forward.
        nothing = no_rows(hidden_size or group_size or 1)
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
        names = ("eps", "norm_before_gate", "group_size", "activation", "casting_mode")
        return f"{self.hidden_size}, {named(self, *names, 'elementwise_affine')}"
