"""Rotary position embedding, as a module."""

from __future__ import annotations

from torch import Tensor, nn

from ..ops.rope import rope


class Rope(nn.Module):
    """Rotary position embedding of queries and keys, by `liger_ops.rope`.

    It applies the tables cos and sin that a model's rotary embedding makes. Layout, precision and
    gradient are those of `liger_ops.rope`.

    Args:
        interleaved: whether the elements of a pair are next to each other (GPT-J, GLM4, Cohere), or
            in the two halves of a head (Llama and most others).

    Shape:
        q: (B, heads, S, D); k: (B, heads of k, S, D); cos, sin: (S, R), (1, S, R) or (B, S, R) with
            R even and at most D; floating point, any strides. The results: as q and k.

    Raises:
        TypeError: a tensor is not floating point, or k is of another dtype than q.
        ValueError: a shape is not as above.

    Example:
        >>> q = torch.tensor([[[[1.0, 0.0]]]])
        >>> liger_ops.nn.Rope()(q, q, torch.zeros(1, 2), torch.ones(1, 2))[0]
        tensor([[[[0., 1.]]]])
    """

    def __init__(self, interleaved: bool = False) -> None:
        super().__init__()
        self.interleaved = interleaved

    def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return rope(q, k, cos, sin, self.interleaved)

    def extra_repr(self) -> str:
        return f"interleaved={self.interleaved}"
