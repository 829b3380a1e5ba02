"""Softmax and its logarithm, as modules."""

from __future__ import annotations

from collections.abc import Callable
from numbers import Integral

from torch import Tensor, nn

from ..ops.log_softmax import log_softmax
from ..ops.softmax import softmax


class Softmax(nn.Softmax):
    """`torch.nn.Softmax`. Calls `liger_ops.softmax`; see there for precision and gradient.

    Args:
        dim: the dimension along which the result sums to 1. The last dimension is fast; another is
            transposed to the last, and back.

    Shape:
        input: any with this dimension, floating point, any strides; the output: the same.

    Raises:
        TypeError: dim is not an int, or input is not floating point.
        ValueError: input has no such dimension.

    Example:
        >>> liger_ops.nn.Softmax()(torch.tensor([[0.0, 0.0, -torch.inf]]))
        tensor([[0.5000, 0.5000, 0.0000]])
    """

    dim: int

    def __init__(self, dim: int = -1) -> None:
        _check_dim("Softmax", dim)
        super().__init__(dim)

    def forward(self, input: Tensor) -> Tensor:
        return _over_dim("Softmax", softmax, input, self.dim)


class LogSoftmax(nn.LogSoftmax):
    """`torch.nn.LogSoftmax`. Calls `liger_ops.log_softmax`; see there for precision and gradient.

    Args:
        dim: the dimension along which the exponentials of the result sum to 1. The last dimension
            is fast; another is transposed to the last, and back.

    Shape:
        input: any with this dimension, floating point, any strides; the output: the same.

    Raises:
        TypeError: dim is not an int, or input is not floating point.
        ValueError: input has no such dimension.

    Example:
        >>> liger_ops.nn.LogSoftmax()(torch.tensor([[0.0, 0.0, -torch.inf]]))
        tensor([[-0.6931, -0.6931,    -inf]])
    """

    dim: int

    def __init__(self, dim: int = -1) -> None:
        _check_dim("LogSoftmax", dim)
        super().__init__(dim)

    def forward(self, input: Tensor) -> Tensor:
        return _over_dim("LogSoftmax", log_softmax, input, self.dim)


def _check_dim(owner: str, dim: int) -> None:
    if not isinstance(dim, Integral):
        raise TypeError(f"{owner}: dim must be an int, got {type(dim).__name__}")


def _over_dim(owner: str, op: Callable[[Tensor], Tensor], x: Tensor, dim: int) -> Tensor:
    """Apply an op of the last dimension along dimension `dim`."""
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"{owner}: dim must be one of input's {x.dim()} dimensions, got {dim}")
    if dim in (-1, x.dim() - 1):
        return op(x)
    return op(x.transpose(dim, -1)).transpose(dim, -1)
