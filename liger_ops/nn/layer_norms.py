"""Layer and group normalisation, as modules."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..ops.norms.group_norm import group_norm
from ..ops.norms.layer_norm import layer_norm
from ..ops.norms.modulated_layer_norm import modulated_layer_norm
from .derived import check_size, documented, named, no_rows
from .norms import OptionalWeight

__all__ = ["GroupNorm", "LayerNorm", "ModulatedLayerNorm"]


@documented(layer_norm, input="x")
class LayerNorm(nn.LayerNorm):
    """`torch.nn.LayerNorm`, with the same arguments and state dict.

    Mean and biased variance are over the dimensions of normalized_shape, the last ones. The class
    is a subclass of `torch.nn.LayerNorm`, for code that looks for that class, for example to
    exclude norms from weight decay.

    Args:
        normalized_shape: the size of the last dimension, or the sizes of the last dimensions. None
            for a last dimension of any size, only without parameters.
        bias: whether the module has a bias beside its weight; without a weight it has no bias.
        input: (..., *normalized_shape), floating point, any strides.

    Attributes:
        weight, bias: of normalized_shape, or None. They start as ones and zeros.

    Returns:
        A tensor of input's shape and dtype, contiguous.

    Example:
        >>> liger_ops.nn.LayerNorm(2, elementwise_affine=False)(torch.tensor([[1.0, 3.0]]))
        tensor([[-1.0000,  1.0000]])
    """

    def __init__(
        self, normalized_shape: int | Sequence[int] | None, eps: float = 1e-5,
        elementwise_affine: bool = True, bias: bool = True,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        if normalized_shape is None:
            if elementwise_affine:
                raise ValueError(
                    "LayerNorm: normalized_shape must be an int or a tuple of ints, got None"
                )
            sizes: tuple[int, ...] = ()
        elif isinstance(normalized_shape, Sequence):
            sizes = tuple(normalized_shape)
            if not sizes:
                raise ValueError("LayerNorm: normalized_shape must name a dimension, got ()")
        else:
            sizes = (normalized_shape,)
        for size in sizes:
            check_size("LayerNorm", "normalized_shape", size)
        layer_norm(no_rows(), None, None, eps)
        super().__init__(sizes, eps, elementwise_affine, bias, device, dtype)

    def forward(self, input: Tensor) -> Tensor:
        shape = self.normalized_shape
        dims = len(shape)
        if input.shape[input.dim() - dims :] != shape:
            sizes = ", ".join(map(str, shape))
            raise ValueError(
                f"LayerNorm: input must be (..., {sizes}), got shape {tuple(input.shape)}"
            )
        if dims <= 1:
            return layer_norm(input, self.weight, self.bias, self.eps)
        weight = None if self.weight is None else self.weight.flatten()
        bias = None if self.bias is None else self.bias.flatten()
        return layer_norm(input.flatten(-dims), weight, bias, self.eps).reshape(input.shape)


@documented(modulated_layer_norm)
class ModulatedLayerNorm(OptionalWeight):
    """Layer normalisation with an adaptive scale and shift.

    y has x's dtype, whatever the dtypes of weight, bias, scale and shift. By default, as in the
    blocks of diffusion transformers, there is neither weight nor bias.

    Args:
        bias: whether the module has a bias beside its weight; without a weight it has no bias.

    Attributes:
        weight, bias: (N,), or None. They start as ones and zeros.

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
        row = torch.empty(1, device="meta")
        modulated_layer_norm(no_rows(), row, None, None, None, eps, casting_mode)
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
        options = named(self, "eps", "casting_mode", "elementwise_affine")
        return f"{self.hidden_size}, {options}, bias={self.bias is not None}"


@documented(group_norm, input="x")
class GroupNorm(nn.GroupNorm):
    """`torch.nn.GroupNorm`, with the same arguments and state dict.

    Args:
        num_groups: the number of groups, a divisor of num_channels.
        num_channels: the size C of the second dimension. Without parameters it is not checked, as
            in torch: input may have any multiple of num_groups.
        affine: whether the module has weight and bias.

    Attributes:
        weight, bias: (C,), or None. They start as ones and zeros.

    Example:
        >>> norm = liger_ops.nn.GroupNorm(2, 4, affine=False)
        >>> norm(torch.tensor([[1.0, 3.0, 0.0, 4.0]]))
        tensor([[-1.0000,  1.0000, -1.0000,  1.0000]])
    """

    def __init__(
        self, num_groups: int, num_channels: int, eps: float = 1e-5, affine: bool = True,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        check_size("GroupNorm", "num_groups", num_groups)
        check_size("GroupNorm", "num_channels", num_channels)
        if num_channels % num_groups != 0:
            raise ValueError(
                f"GroupNorm: num_groups must be a divisor of num_channels, {num_channels},"
                f" got {num_groups}"
            )
        group_norm(no_rows(), 1, None, None, eps)
        super().__init__(num_groups, num_channels, eps, affine, device, dtype)

    def forward(self, input: Tensor) -> Tensor:
        return group_norm(input, self.num_groups, self.weight, self.bias, self.eps)
