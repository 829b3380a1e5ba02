"""Modules that call a global function with queries, keys and tables, for the tests of `fuse`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as llama

from called_ops import called

B, H, K, S, D = 2, 4, 2, 5, 16


class Rotating(nn.Module):
    """Calls a global function with the arguments of its forward."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return rotate(*args, **kwargs)


rotate: Callable[..., Any] = llama


def set_rotate(monkeypatch: pytest.MonkeyPatch, function: Callable[..., Any]) -> None:
    """Make `rotate`, which Rotating calls, another function."""
    monkeypatch.setattr(sys.modules[__name__], "rotate", function)


def ops_of(module: nn.Module, args: Any, kwargs: dict[str, Any] | None = None) -> list[str]:
    """List the liger ops that a forward runs."""
    return list(called(module, *args, **(kwargs or {}))[1].elements())


def tensors(
    layout: str = "bhsd",
    width: int = D,
    dtype: torch.dtype = torch.float32,
    table_dtype: torch.dtype | None = None,
    leading: tuple[int, ...] = (),
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return queries and keys as attention gets them, in a layout, and cos and sin."""
    generator = torch.Generator().manual_seed(1)
    sizes = {"b": B, "s": S, "d": D}
    heads = []
    for count in (H, K):
        shape = [count if name == "h" else sizes[name] for name in layout]
        heads.append(torch.randn(shape, generator=generator).to(dtype))
    table_shape = (*leading, *([B] if "b" in layout else []), S, width)
    angles = 3 * torch.randn(table_shape, generator=generator)
    tables = (table.to(table_dtype or dtype) for table in (angles.cos(), angles.sin()))
    return (*heads, *tables)


def interleaved(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate GPT-J's pairs, with a table entry per element, as in Cohere."""

    def turned(x: Tensor) -> Tensor:
        return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)

    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return q * cos + turned(q) * sin, k * cos + turned(k) * sin
