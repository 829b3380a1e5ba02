"""Weight gradients: the programs' partial sums, added in a fixed order."""

from __future__ import annotations

import torch
from torch import Tensor


def partial_sums(dweight: Tensor | None, parts: int) -> Tensor | None:
    """Allocate float32 memory for `parts` partial sums of dweight; return None if it is None."""
    if dweight is None:
        return None
    return dweight.new_empty((parts, *dweight.shape), dtype=torch.float32)


def summed(partial: Tensor | None, dweight: Tensor | None) -> None:
    """Sum the partial sums into dweight, in float32 and in a fixed order."""
    if partial is not None and dweight is not None:
        if dweight.dtype is torch.float32:
            torch.sum(partial, 0, out=dweight)
        else:
            dweight.copy_(partial.sum(0))
