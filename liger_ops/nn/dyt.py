"""Dynamic Tanh, as a module."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..ops.norms.dyt import dyt
from .checks import check_size


class DyT(nn.Module):
    """Dynamic Tanh, in place of a norm over the last dimension. Calls `liger_ops.dyt`.

        y = gamma * tanh(alpha * x) + beta

    See `liger_ops.dyt` for precision and gradient.

    Args:
        hidden_size: the size N of the last dimension.
        beta: whether the module has a beta.
        init_alpha: the initial value of alpha.
        device, dtype: of the parameters.

    Attributes:
        alpha: (1,). It starts as init_alpha.
        gamma: (N,). It starts as ones.
        beta: (N,), or None. It starts as zeros.

    Shape:
        x: (..., N), floating point, any strides; y: the same, contiguous.

    Raises:
        TypeError: hidden_size is not an int, or x is not floating point.
        ValueError: hidden_size is not positive, or x has another width.

    Example:
        >>> liger_ops.nn.DyT(2)(torch.tensor([[0.0, 2.0]])).detach()
        tensor([[0.0000, 0.7616]])
    """

    beta: nn.Parameter | None

    def __init__(
        self, hidden_size: int, beta: bool = True, init_alpha: float = 0.5,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        check_size("DyT", "hidden_size", hidden_size)
        self.hidden_size = hidden_size
        self.init_alpha = init_alpha
        self.alpha = nn.Parameter(torch.empty(1, device=device, dtype=dtype))
        self.gamma = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        shift = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype)) if beta else None
        self.register_parameter("beta", shift)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set alpha to init_alpha, gamma to 1 and beta to 0."""
        nn.init.constant_(self.alpha, self.init_alpha)
        nn.init.ones_(self.gamma)
        if self.beta is not None:
            nn.init.zeros_(self.beta)

    def forward(self, x: Tensor) -> Tensor:
        return dyt(x, self.alpha, self.gamma, self.beta)

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, beta={self.beta is not None}, init_alpha={self.init_alpha}"
