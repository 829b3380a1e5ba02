"""Root-mean-square normalisation of the heads of queries and keys, and rotary embedding."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..ops.rope.rms_norm_rope import rms_norm_rope
from .checks import check_size


class RMSNormRope(nn.Module):
    """RMSNorm over the heads of queries and keys, then rotary position embedding. Calls
    `liger_ops.rms_norm_rope`.

    It has the weights of both norms (`q_norm` and `k_norm` of Qwen3 and Gemma 3), and applies the
    tables that a model's rotary embedding computes. See `liger_ops.rms_norm_rope` for layout,
    rounding, precision and gradient.

    Args:
        head_dim: the size D of a head; None for any size, only without weights.
        eps: added to the mean square, at least 0.
        offset: added to both weights: 1.0 for models that store weight - 1 (Gemma).
        casting_mode: "llama", "gemma" or "none": see `liger_ops.rms_norm`.
        interleaved, per_pair, sections, deinterleave: as in `liger_ops.nn.Rope`.
        elementwise_affine: whether the module has weights.
        device, dtype: of the weights.

    Attributes:
        q_weight, k_weight: (D,), or None. They start as 1 - offset.

    Shape:
        q: (B, heads, S, D); k: (B, heads of k, S, D); cos and sin as in `liger_ops.nn.Rope`; the
        results: as q and k.

    Raises:
        TypeError: an argument has another type, or a tensor is not floating point.
        ValueError: head_dim is not positive, or an option or a shape is not as above.

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
        self.eps = eps
        self.offset = offset
        self.casting_mode = casting_mode
        self.interleaved = interleaved
        self.per_pair = per_pair
        self.sections = None if sections is None else list(sections)
        self.deinterleave = deinterleave
        self.elementwise_affine = elementwise_affine
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
        return (
            f"{self.head_dim}, eps={self.eps}, offset={self.offset},"
            f" casting_mode={self.casting_mode!r}, interleaved={self.interleaved},"
            f" per_pair={self.per_pair}, sections={self.sections},"
            f" deinterleave={self.deinterleave}, elementwise_affine={self.elementwise_affine}"
        )
