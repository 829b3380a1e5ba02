"""Applying an op of the last dimension along another dimension."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


def along_dim(
    owner: str, argument: str, op: Callable[[Tensor], Tensor], x: Tensor, dim: int
) -> Tensor:
    """Apply an op of the last dimension along dimension `dim`.

    Raise ValueError if x lacks that dimension. The message begins with `owner`, the op or module
    called, and calls x by the name `argument`.
    """
    if not -x.dim() <= dim < x.dim():
        raise ValueError(
            f"{owner}: dim must be one of {argument}'s {x.dim()} dimensions, got {dim}"
        )
    if dim in (-1, x.dim() - 1):
        return op(x)
    return op(x.transpose(dim, -1)).transpose(dim, -1)
