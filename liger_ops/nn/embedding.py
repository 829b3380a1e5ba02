"""A table of vectors, as a module."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..ops.embedding import embedding
from .derived import documented

__all__ = ["Embedding"]


@documented(embedding)
class Embedding(nn.Embedding):
    """A table of vectors that are looked up by index.

        y[i] = weight[indices[i]]

    It is a torch.nn.Embedding, with the same arguments, attributes and state_dict. Its gradient is
    summed in float32, in an order that does not change between runs.

    Args:
        num_embeddings: the number V of vectors.
        embedding_dim: the size D of each.
        padding_idx: an index whose vector is 0 at the start and has no gradient; or None.
        max_norm, scale_grad_by_freq, sparse: must be None, False and False, else ValueError;
            max_norm would write to the weight in the forward.
        norm_type, _weight, _freeze: as for `torch.nn.Embedding`.

    Attributes:
        weight: (V, D).

    Example:
        >>> table = liger_ops.nn.Embedding(10, 4, padding_idx=0)
        >>> table(torch.tensor([[1, 2, 0]])).shape
        torch.Size([1, 3, 4])
    """

    def __init__(
        self, num_embeddings: int, embedding_dim: int, padding_idx: int | None = None,
        max_norm: float | None = None, norm_type: float = 2.0, scale_grad_by_freq: bool = False,
        sparse: bool = False, _weight: Tensor | None = None, _freeze: bool = False,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__(
            num_embeddings, embedding_dim, padding_idx, max_norm, norm_type, scale_grad_by_freq,
            sparse, _weight, _freeze, device, dtype,
        )  # fmt: skip
        for name, off in (("max_norm", None), ("scale_grad_by_freq", False), ("sparse", False)):
            value = getattr(self, name)
            if value is not off:
                raise ValueError(f"Embedding: {name} must be {off}, got {value!r}")

    def forward(self, indices: Tensor) -> Tensor:
        return embedding(self.weight, indices, self.padding_idx)
