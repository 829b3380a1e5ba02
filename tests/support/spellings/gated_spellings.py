"""Halves of gated activations, and the ways in which models unpack them from one tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from rewriting import DTYPES, values

every_dtype = pytest.mark.parametrize(
    "dtype", [*DTYPES.values(), torch.float16], ids=[*DTYPES, "float16"]
)


def halves(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return values(2, 3, 8, dtype=dtype), values(2, 3, 8, dtype=dtype, seed=1)


def origin(node: Any) -> str:
    """Return the name of the input that a node is computed from."""
    while node.op != "placeholder":
        node = node.args[0]
    return node.name


def chunked(packed: Tensor) -> tuple[Tensor, ...]:
    return packed.chunk(2, dim=-1)


PACKED: dict[str, Callable[[Tensor], tuple[Tensor, ...]]] = {
    "chunk": chunked,
    "split": lambda packed: torch.split(packed, packed.shape[-1] // 2, dim=-1),
    "slices": lambda packed: (packed[..., :8], packed[..., 8:]),
    "neighbours": lambda packed: (packed[..., ::2], packed[..., 1::2]),
    "unbound": lambda packed: packed.view(2, 3, 2, 8).unbind(2),
}
