"""Attention residuals, as a module."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..ops.attention.attn_res import attn_res


class AttnRes(nn.Module):
    """The mean of the blocks' outputs, weighted by attention over them. Calls
    `liger_ops.attn_res`.

        score[i] = sum(query * weight * norm(x[i]))
        y = sum over i of softmax(score)[i] * x[i]

    See `liger_ops.attn_res` for precision and gradient.

    Args:
        hidden_size: the size D of the last dimension.
        eps: added to the mean square, at least 0.
        device, dtype: of query and weight.

    Attributes:
        query: (D,). It starts as 0: all blocks have the same weight.
        weight: (D,). It starts as 1.

    Shape:
        x: (N, ..., D), or a list of N tensors (..., D), which is stacked; y: (..., D).

    Raises:
        TypeError: x is not floating point.
        ValueError: hidden_size is not positive, or x has another width or no block.

    Example:
        >>> mix = liger_ops.nn.AttnRes(4)
        >>> mix([torch.zeros(2, 4), torch.ones(2, 4)]).shape
        torch.Size([2, 4])
    """

    def __init__(
        self, hidden_size: int, eps: float = 1e-6,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        if hidden_size < 1:
            raise ValueError(f"AttnRes: hidden_size must be a positive int, got {hidden_size}")
        if not eps >= 0:
            raise ValueError(f"AttnRes: eps must be a number of at least 0, got {eps}")
        self.hidden_size = hidden_size
        self.eps = eps
        self.query = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.weight = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set query to 0 and weight to 1."""
        nn.init.zeros_(self.query)
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor | list[Tensor] | tuple[Tensor, ...]) -> Tensor:
        blocks = x if isinstance(x, Tensor) else torch.stack(tuple(x))
        return attn_res(blocks, self.query, self.weight, self.eps)

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, eps={self.eps}"
