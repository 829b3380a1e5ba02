"""Layer normalisation, as a module."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..ops.norms.layer_norm import layer_norm
from .checks import check_size


class LayerNorm(nn.LayerNorm):
    """`torch.nn.LayerNorm`, with the same arguments and state dict. Calls `liger_ops.layer_norm`.

        y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias

    with mean and biased variance over the last dimensions, those of normalized_shape. It is a
    subclass, so that code that looks for `torch.nn.LayerNorm`, for example to exclude norms from
    weight decay, finds it. See `liger_ops.layer_norm` for precision and gradient.

    Args:
        normalized_shape: the size of the last dimension, or the sizes of the last dimensions. None
            for a last dimension of any size, only without parameters.
        eps: added to the variance, at least 0.
        elementwise_affine: whether the module has a weight.
        bias: whether it has a bias as well; without a weight it has none.
        device, dtype: of the parameters.

    Attributes:
        weight, bias: of normalized_shape, or None. They start as ones and zeros.

    Shape:
        input: (..., *normalized_shape), floating point, any strides; the output: the same,
            contiguous.

    Raises:
        TypeError: an argument has another type, or input is not floating point.
        ValueError: a size is not positive, eps is negative, or input does not end in
            normalized_shape.

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
        layer_norm(torch.empty(0, 1, device="meta"), None, None, eps)
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
