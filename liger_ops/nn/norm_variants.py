"""Dynamic Tanh, which replaces a norm, and the PolyNorm activation, as modules."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..ops.norms.dyt import dyt
from ..ops.norms.poly_norm import poly_norm
from .derived import check_size, documented, no_rows

__all__ = ["DyT", "PolyNorm"]


@documented(dyt)
class DyT(nn.Module):
    """Dynamic Tanh, which replaces a norm over the last dimension.

    Args:
        hidden_size: the size N of the last dimension.
        beta: whether the module has a beta.
        init_alpha: the initial value of alpha.

    Attributes:
        alpha: (1,). It starts as init_alpha.
        gamma: (N,). It starts as ones.
        beta: (N,), or None. It starts as zeros.

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


@documented(poly_norm)
class PolyNorm(nn.Module):
    """The PolyNorm activation.

    The parameters are those of its authors' module, and of the Motif models.

    Attributes:
        weight: (3,), the weights of x**3, x**2 and x. It starts as 1 / 3.
        bias: (1,). It starts as 0.

    Example:
        >>> liger_ops.nn.PolyNorm()(torch.tensor([[-1.0, 1.0]])).detach()
        tensor([[-0.3333,  1.0000]])
    """

    def __init__(
        self, eps: float = 1e-6,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        # Raises the op's own errors for a wrong eps now, not at the first forward.
        poly_norm(no_rows(), torch.empty(3, device="meta"), None, eps)
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(3, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(1, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weights to 1 / 3 and the bias to 0."""
        nn.init.constant_(self.weight, 1 / 3)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        return poly_norm(x, self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        return f"eps={self.eps}"
