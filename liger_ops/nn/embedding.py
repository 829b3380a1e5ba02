"""A table of vectors, as a module."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ..ops.embedding import embedding


class Embedding(nn.Embedding):
    """A table of vectors that are looked up by index. Calls `liger_ops.embedding`.

        y[i] = weight[indices[i]]

    A torch.nn.Embedding, with its arguments, attributes and state_dict, whose gradient is summed in
    float32 and in an order that does not change between runs. See `liger_ops.embedding`.

    Args:
        num_embeddings: the number V of vectors.
        embedding_dim: the size D of each.
        padding_idx: an index whose vector is 0 at the start and has no gradient; or None.
        device, dtype: of the weight.
        args, options: other arguments of torch.nn.Embedding. max_norm, which writes to the weight
            in the forward, scale_grad_by_freq and sparse must be off.

    Attributes:
        weight: (V, D).

    Shape:
        indices: (...), int32 or int64; y: (..., D), of weight's dtype.

    Raises:
        TypeError: indices is not int32 or int64.
        ValueError: an option is not as above.

    Example:
        >>> table = liger_ops.nn.Embedding(10, 4, padding_idx=0)
        >>> table(torch.tensor([[1, 2, 0]])).shape
        torch.Size([1, 3, 4])
    """

    def __init__(
        self, num_embeddings: int, embedding_dim: int, padding_idx: int | None = None,
        *args: Any, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(num_embeddings, embedding_dim, padding_idx, *args, **options)
        for name, off in (("max_norm", None), ("scale_grad_by_freq", False), ("sparse", False)):
            value = getattr(self, name)
            if value is not off:
                raise ValueError(f"Embedding: {name} must be {off}, got {value!r}")

    def forward(self, indices: Tensor) -> Tensor:
        return embedding(self.weight, indices, self.padding_idx)
