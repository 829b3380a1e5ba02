"""The PolyNorm activation, as a module."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..ops.norms.poly_norm import poly_norm


class PolyNorm(nn.Module):
    """The PolyNorm activation. Calls `liger_ops.poly_norm`.

        y = weight[0] * norm(x**3) + weight[1] * norm(x**2) + weight[2] * norm(x) + bias
        norm(u) = u / sqrt(mean(u**2, -1) + eps)

    The parameters are those of its authors' module, and of the Motif models. See
    `liger_ops.poly_norm` for precision and gradient.

    Args:
        eps: added to each mean square, at least 0.
        device, dtype: of the parameters.

    Attributes:
        weight: (3,), of x**3, x**2 and x. It starts as 1 / 3.
        bias: (1,). It starts as 0.

    Shape:
        x: (..., N), floating point, any strides; y: the same, contiguous.

    Raises:
        TypeError: eps is not a number, or x is not floating point.
        ValueError: eps is negative, or x has no dimension.

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
        poly_norm(torch.empty(0, 1, device="meta"), torch.empty(3, device="meta"), None, eps)
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
