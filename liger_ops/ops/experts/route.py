"""The rows of tokens by expert, as the definition of moe_experts needs them."""

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
        ids = top_k_index.flatten().long()
        ids = ids.where((ids >= 0) & (ids < E), E)
        ids, order = ids.sort(stable=True)
        offsets = torch.searchsorted(ids, torch.arange(E + 1, device=ids.device))
        if ids.is_meta:
            # Any sizes have the same number of operations.
            return cls(order, offsets, [ids.numel(), *[0] * E])
        ends = [*offsets.tolist(), ids.numel()]
        return cls(order, offsets, [end - start for start, end in pairwise(ends)])
