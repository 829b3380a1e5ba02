"""Rotary position embedding of queries and keys, alone and after a norm, as modules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..ops.rope.rms_norm_rope import rms_norm_rope
from ..ops.rope.rope import rope
from .derived import OptionsModule, check_size, documented, named

__all__ = ["RMSNormRope", "Rope"]


@documented(rope)
@dataclass(eq=False, repr=False)
class Rope(OptionsModule):
    """Rotary position embedding of queries and keys.

    A model's rotary embedding computes the tables: cos and sin, the complex cos + i sin, or
    matrices.

    Args:
        interleaved: whether the elements of a pair are next to each other (GPT-J, GLM4, Cohere), or
            in the two halves of a head (Llama and most others). A complex cos and matrices imply
            True.
        per_pair: whether the tables have one value per pair of elements (GPT-OSS). A complex cos
            implies True.
        sections: the numbers of pairs that use each of three tables (Qwen2-VL), or None.
        deinterleave: whether interleaved pairs are written in two halves (DeepSeek).

    Example:
        >>> q = torch.tensor([[[[1.0, 0.0]]]])
        >>> liger_ops.nn.Rope()(q, q, torch.zeros(1, 2), torch.ones(1, 2))[0]
        tensor([[[[0., 1.]]]])
    """

    interleaved: bool = False
    per_pair: bool = False
    sections: Sequence[int] | None = None
    deinterleave: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.sections = None if self.sections is None else list(self.sections)

    def forward(
        self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        return rope(q, k, cos, sin, *self.options)


@documented(rms_norm_rope)
class RMSNormRope(nn.Module):
    """RMSNorm over the heads of queries and keys, then rotary position embedding.

    It has the weights of both norms (`q_norm` and `k_norm` of Qwen3 and Gemma 3). A model's rotary
    embedding computes the tables.

    Args:
        head_dim: the size D of a head; None for any size, only without weights.
        elementwise_affine: whether the module has weights.

    Attributes:
        q_weight, k_weight: (D,), or None. They start as 1 - offset.

    Example:
        >>> norm = liger_ops.nn.RMSNormRope(2)
        >>> q = torch.tensor([[[[3.0, 4.0]]]])
        >>> norm(q, q, torch.zeros(1, 2), torch.ones(1, 2))[0].detach()
        tensor([[[[-1.1314,  0.8485]]]])
    """

    q_weight: nn.Parameter | None
    k_weight: nn.Parameter | None

    def __init__(
        self, head_dim: int | None, eps: float = 1e-6, offset: float = 0.0,
        casting_mode: str = "llama", interleaved: bool = False, per_pair: bool = False,
        sections: Sequence[int] | None = None, deinterleave: bool = False,
        elementwise_affine: bool = True,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        if head_dim is not None:
            check_size("RMSNormRope", "head_dim", head_dim)
        elif elementwise_affine:
            raise ValueError("RMSNormRope: head_dim must be a positive int, got None")
        self.head_dim = head_dim
        self.eps, self.offset, self.casting_mode = eps, offset, casting_mode
        self.interleaved, self.per_pair = interleaved, per_pair
        self.sections = None if sections is None else list(sections)
        self.deinterleave, self.elementwise_affine = deinterleave, elementwise_affine
        for name in ("q_weight", "k_weight"):
            weight = None
            if head_dim is not None and elementwise_affine:
                weight = nn.Parameter(torch.empty(head_dim, device=device, dtype=dtype))
            self.register_parameter(name, weight)
        self._check_options()
        self.reset_parameters()

    def _check_options(self) -> None:
        """Raise the op's own errors for wrong options now, not at the first forward."""
        x, table = torch.empty(0, 1, 1, 2, device="meta"), torch.empty(1, 2, device="meta")
        weight = table[0] if self.elementwise_affine else None
        options = (self.eps, self.offset, self.casting_mode)
        rms_norm_rope(x, x, table, table, weight, weight, *options)

    def reset_parameters(self) -> None:
        """Set the weights to 1 - offset."""
        for weight in (self.q_weight, self.k_weight):
            if weight is not None:
                nn.init.constant_(weight, 1.0 - self.offset)

    def forward(
        self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        if self.q_weight is None and self.head_dim not in (None, q.shape[-1]):
            raise ValueError(
                f"RMSNormRope: q must be (B, heads, S, {self.head_dim}), got shape {tuple(q.shape)}"
            )
        return rms_norm_rope(
            q, k, cos, sin, self.q_weight, self.k_weight,
            self.eps, self.offset, self.casting_mode,
            self.interleaved, self.per_pair, self.sections, self.deinterleave,
        )  # fmt: skip

    def extra_repr(self) -> str:
        names = ("eps", "offset", "casting_mode", "interleaved", "per_pair", "sections")
        return f"{self.head_dim}, {named(self, *names, 'deinterleave', 'elementwise_affine')}"
