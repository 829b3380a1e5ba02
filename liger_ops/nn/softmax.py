"""Softmax, log-softmax and sparsemax, as modules."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral

from torch import Tensor, nn

from ..ops.softmax.log_softmax import log_softmax
from ..ops.softmax.softmax import softmax
from ..ops.softmax.sparsemax import sparsemax
from ..ops.tensors import along_dim
from .derived import OptionsModule, documented

__all__ = ["LogSoftmax", "Softmax", "Sparsemax"]


@documented(softmax, input="x")
class Softmax(nn.Softmax):
    """`torch.nn.Softmax`.

    Args:
        dim: the dimension along which the result sums to 1. The last dimension is fast; another is
            transposed to the last, and back.

    Example:
        >>> liger_ops.nn.Softmax()(torch.tensor([[0.0, 0.0, -torch.inf]]))
        tensor([[0.5000, 0.5000, 0.0000]])
    """

    dim: int

    def __init__(self, dim: int = -1) -> None:
        _check_dim("Softmax", dim)
        super().__init__(dim)

    def forward(self, input: Tensor) -> Tensor:
        return along_dim("Softmax", "input", softmax, input, self.dim)


@documented(log_softmax, input="x")
class LogSoftmax(nn.LogSoftmax):
    """`torch.nn.LogSoftmax`.

    Args:
        dim: the dimension along which the exponentials of the result sum to 1. The last dimension
            is fast; another is transposed to the last, and back.

    Example:
        >>> liger_ops.nn.LogSoftmax()(torch.tensor([[0.0, 0.0, -torch.inf]]))
        tensor([[-0.6931, -0.6931,    -inf]])
    """

    dim: int

    def __init__(self, dim: int = -1) -> None:
        _check_dim("LogSoftmax", dim)
        super().__init__(dim)

    def forward(self, input: Tensor) -> Tensor:
        return along_dim("LogSoftmax", "input", log_softmax, input, self.dim)


@documented(sparsemax)
@dataclass(eq=False, repr=False)
class Sparsemax(OptionsModule):
    """Sparsemax: the Euclidean projection on the probability simplex.

    Example:
        >>> liger_ops.nn.Sparsemax()(torch.tensor([[0.5, 1.0, -1.0]]))
        tensor([[0.2500, 0.7500, 0.0000]])
    """

    dim: int = -1

    def _check(self) -> None:
        _check_dim("Sparsemax", self.dim)

    def forward(self, x: Tensor) -> Tensor:
        return sparsemax(x, self.dim)


def _check_dim(owner: str, dim: int) -> None:
    if not isinstance(dim, Integral):
        raise TypeError(f"{owner}: dim must be an int, got {type(dim).__name__}")
