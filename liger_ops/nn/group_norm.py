"""Group normalisation, as a module."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..ops.norms.group_norm import group_norm
from .checks import check_size


class GroupNorm(nn.GroupNorm):
    """`torch.nn.GroupNorm`, with the same arguments and state dict. Calls `liger_ops.group_norm`.

        y[n, c] = (x[n, c] - mean(n, g)) / sqrt(var(n, g) + eps) * weight[c] + bias[c]

    with mean and biased variance over all positions and channels of the group g that holds channel
    c. See `liger_ops.group_norm` for precision and gradient.

    Args:
        num_groups: the number of groups, a divisor of num_channels.
        num_channels: the size C of the second dimension. Without parameters, as in torch, it is not
            checked: input may have any multiple of num_groups.
        eps: added to the variance, at least 0.
        affine: whether the module has weight and bias.
        device, dtype: of the parameters.

    Attributes:
        weight, bias: (C,), or None. They start as ones and zeros.

    Shape:
        input: (N, C, *spatial), floating point, any strides; the output: the same, contiguous.

    Raises:
        TypeError: an argument has another type, or input is not floating point.
        ValueError: num_groups does not divide num_channels, a size is not positive, eps is
            negative, or input has another number of channels than the parameters.

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
        group_norm(torch.empty(0, 1, device="meta"), 1, None, None, eps)
        super().__init__(num_groups, num_channels, eps, affine, device, dtype)

    def forward(self, input: Tensor) -> Tensor:
        return group_norm(input, self.num_groups, self.weight, self.bias, self.eps)
