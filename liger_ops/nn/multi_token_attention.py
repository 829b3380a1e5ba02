"""The weights of attention, mixed by a convolution, as a module."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ..ops.attention.multi_token_attention import multi_token_attention
from ..ops.attention.windows import per_dimension
from .checks import check_size


class MultiTokenAttention(nn.Module):
    """The weights of causal attention, mixed over neighbouring queries, keys and heads. Calls
    `liger_ops.multi_token_attention`; see there for the equation, precision, memory and gradient.

    Its arguments are those of `torch.nn.Conv2d`, and of Liger-Kernel's `LigerMultiTokenAttention`.

    Args:
        in_channels: the number C of heads of scores.
        out_channels: the number C_out of heads of the result.
        kernel_size, stride, padding, dilation: of the convolution over queries and keys; a value
            for both dimensions, or a list of one for each.
        groups: into how many groups the convolution splits the heads.
        bias: whether the module has a bias.
        sparse: whether the weights are the sparsemax of scores, and not their softmax.
        device, dtype: of the parameters.

    Attributes:
        weight: (C_out, C / groups, K_i, K_j). It starts as that of `torch.nn.Conv2d`.
        bias: (C_out,), or None. It starts as zeros.

    Shape:
        scores: (B, C, L, L), floating point, any strides.
        The result: (B, C_out, L', L'), contiguous, of weight's dtype.

    Raises:
        TypeError: a size is not an int, or scores is not floating point.
        ValueError: an option or a shape is not as `liger_ops.multi_token_attention` takes it.

    Example:
        >>> module = liger_ops.nn.MultiTokenAttention(2, 4, 3, padding=1)
        >>> module(torch.zeros(1, 2, 5, 5)).shape
        torch.Size([1, 4, 5, 5])
    """

    bias: nn.Parameter | None

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: int | list[int],
        stride: int | list[int] = 1, padding: int | list[int] = 0, dilation: int | list[int] = 1,
        groups: int = 1, bias: bool = True, sparse: bool = False,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.kernel_size, self.stride, self.padding, self.dilation = (
            per_dimension(value, 2) for value in (kernel_size, stride, padding, dilation)
        )
        sizes = {"in_channels": in_channels, "out_channels": out_channels, "groups": groups}
        for name, size in sizes.items():
            check_size("MultiTokenAttention", name, size)
        for size in self.kernel_size:
            check_size("MultiTokenAttention", "kernel_size", size)
        self.in_channels, self.out_channels, self.groups = in_channels, out_channels, groups
        self.sparse = sparse
        shape = (out_channels, in_channels // groups, *self.kernel_size)
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        parameter = torch.empty(out_channels, device=device, dtype=dtype) if bias else None
        self.register_parameter("bias", None if parameter is None else nn.Parameter(parameter))
        self._check_options()
        self.reset_parameters()

    def _check_options(self) -> None:
        """Raise as the op does for scores of any length."""
        with torch.device("meta"):
            scores, weight = torch.empty(0, self.in_channels, 2**20, 2**20), self.weight
            multi_token_attention(scores, torch.empty(weight.shape), None, *self._options)

    @property
    def _options(self) -> tuple[list[int], list[int], list[int], int, bool]:
        return self.stride, self.padding, self.dilation, self.groups, self.sparse

    def reset_parameters(self) -> None:
        """Draw weight as `torch.nn.Conv2d` does, and set bias to 0."""
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, scores: Tensor) -> Tensor:
        return multi_token_attention(scores, self.weight, self.bias, *self._options)

    def extra_repr(self) -> str:
        return (
            f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size},"
            f" stride={self.stride}, padding={self.padding}, dilation={self.dilation},"
            f" groups={self.groups}, bias={self.bias is not None}, sparse={self.sparse}"
        )
