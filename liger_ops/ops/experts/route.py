"""The rows of tokens by expert."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor


class Route(NamedTuple):
    """`order` and `offsets`, as `moe_experts_forward` returns them, but int64; and the numbers of
    rows of each expert and of sentinels, read from the device."""

    order: Tensor
    offsets: Tensor
    sizes: list[int]

    @classmethod
    def of(cls, top_k_index: Tensor, E: int) -> Route:
        order, offsets = sort(top_k_index, E)
        if order.is_meta:
            # Any sizes have the same number of operations.
            return cls(order, offsets, [order.numel(), *[0] * E])
        ends = [*offsets.tolist(), order.numel()]
        return cls(order, offsets, [end - start for start, end in pairwise(ends)])


def sort(top_k_index: Tensor, E: int, dtype: torch.dtype = torch.int64) -> tuple[Tensor, Tensor]:
    """`order` and `offsets`, as `moe_experts_forward` returns them, but int64. The ids are sorted
    as numbers of dtype."""
    ids = top_k_index.flatten()
    ids = ids.where((ids >= 0) & (ids < E), E).to(dtype)
    ids, order = ids.sort(stable=True)
    ends = torch.arange(E + 1, dtype=dtype, device=ids.device)
    return order, torch.searchsorted(ids, ends)
