"""Rotary position embedding, as a module."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from ..ops.rope.rope import rope


class Rope(nn.Module):
    """Rotary position embedding of queries and keys. Calls `liger_ops.rope`.

    It applies the tables cos and sin, the complex cos + i sin, or the matrices, that a model's
    rotary embedding computes. See `liger_ops.rope` for layout, precision and gradient.

    Args:
        interleaved: whether the elements of a pair are next to each other (GPT-J, GLM4, Cohere), or
            in the two halves of a head (Llama and most others). A complex cos implies it, and so do
            matrices.
        per_pair: whether the tables have one value per pair of elements (GPT-OSS). A complex cos
            implies it.
        sections: the numbers of pairs that use each of three tables (Qwen2-VL), or None.
        deinterleave: whether interleaved pairs are written in two halves (DeepSeek).

    Shape:
        q: (B, heads, S, D); k: (B, heads of k, S, D); cos, sin: (S, R), (1, S, R) or (B, S, R) with
            R even and at most D; floating point, any strides. Per pair and for a complex cos, R/2
            in place of R; with sections, (3, 1, S, R) or (3, B, S, R); matrices, (S, R/2, 2, 2) or
            with 1 or B before. The results: as q and k.

    Raises:
        TypeError: a tensor is not floating point (cos may be complex), or q and k differ in dtype.
        ValueError: a shape is not as above, sections do not add up to R/2, sin is given with a
            complex cos, sin is missing with a real one that holds no matrices, or deinterleave is
            given without interleaved pairs.

    Example:
        >>> q = torch.tensor([[[[1.0, 0.0]]]])
        >>> liger_ops.nn.Rope()(q, q, torch.zeros(1, 2), torch.ones(1, 2))[0]
        tensor([[[[0., 1.]]]])
    """

    def __init__(
        self,
        interleaved: bool = False, per_pair: bool = False, sections: Sequence[int] | None = None,
        deinterleave: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.interleaved = interleaved
        self.per_pair = per_pair
        self.sections = None if sections is None else list(sections)
        self.deinterleave = deinterleave

    def forward(
        self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        options = (self.interleaved, self.per_pair, self.sections, self.deinterleave)
        return rope(q, k, cos, sin, *options)

    def extra_repr(self) -> str:
        return (
            f"interleaved={self.interleaved}, per_pair={self.per_pair}, sections={self.sections},"
            f" deinterleave={self.deinterleave}"
        )
