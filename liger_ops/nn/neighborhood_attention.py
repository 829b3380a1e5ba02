"""Attention of every query to the keys in a window around it, as a module."""

from __future__ import annotations

from torch import Tensor, nn

from ..ops.attention.neighborhood_attention import neighborhood_attention


class NeighborhoodAttention(nn.Module):
    """Attention of every query to the keys in a window around it. Calls
    `liger_ops.neighborhood_attention`; see there for windows, precision, memory and gradient.

    It has no parameters: a model's own layers project to query, key and value.

    Args:
        kernel_size: the keys of a window; a value for every dimension, or a list of one for each.
        dilation: the distance of two neighbouring keys of a window; likewise.
        is_causal: whether a query attends to no later position; likewise.
        border: "clipped", as in Liger-Kernel, or "shifted", as in NATTEN.
        scale: by which scores are multiplied; None for 1 / sqrt(D).

    Shape:
        query: (B, H, L, D) or (B, H, Y, X, D), floating point, any strides.
        key, value: as query but for the heads, of which they may have fewer.
        The result: as query.

    Raises:
        TypeError, ValueError: see `liger_ops.neighborhood_attention`.

    Example:
        >>> query, value = torch.zeros(1, 1, 4, 1), torch.arange(4.0).view(1, 1, 4, 1)
        >>> liger_ops.nn.NeighborhoodAttention(3)(query, query, value).flatten()
        tensor([0.5000, 1.0000, 2.0000, 2.5000])
    """

    def __init__(
        self, kernel_size: int | list[int], dilation: int | list[int] = 1,
        is_causal: bool | list[bool] = False, border: str = "clipped", scale: float | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.kernel_size, self.dilation, self.is_causal = kernel_size, dilation, is_causal
        self.border, self.scale = border, scale

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        options = (self.kernel_size, self.dilation, self.is_causal, self.border, self.scale)
        return neighborhood_attention(query, key, value, *options)

    def extra_repr(self) -> str:
        return (
            f"kernel_size={self.kernel_size}, dilation={self.dilation},"
            f" is_causal={self.is_causal}, border={self.border!r}, scale={self.scale}"
        )
