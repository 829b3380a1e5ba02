"""Neighborhood attention on a device: the arguments and launches of its kernels, and the bounds of
their windows of keys and of queries.

A kernel has two dimensions of positions, Y and X; one dimension is a Y of 1. A position is counted
within its residue class, which has n positions (see `liger_ops/ops/attention/windows.py`). Bounds
are the first position and the end, one behind the last.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .... import library
from ....ops.attention.windows import Window, windows
from ..tensors import cdiv, unit_stride

LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def keys_of(query, n, left, right, SHIFTED: tl.constexpr):
    """Return the bounds of the keys that queries attend to. A SHIFTED window keeps its size at the
    borders."""
    if SHIFTED:
        size = left + right + 1
        first = tl.minimum(tl.maximum(query - left, 0), n - size)
        end = first + size
    else:
        first = tl.maximum(query - left, 0)
        end = tl.minimum(query + right + 1, n)
    return first, end


@triton.jit
def queries_of(key, n, left, right, SHIFTED: tl.constexpr):
    """Return the bounds of the queries that attend to keys."""
    first = tl.maximum(key - right, 0)
    end = tl.minimum(key + left + 1, n)
    if SHIFTED:
        size = left + right + 1
        # The shifted windows of the first queries end at `size`, those of the last start at
        # n - size.
        first = tl.where(key < size, 0, first)
        end = tl.where(key >= n - size, n, end)
    return first, end


@triton.jit
def keys_of_tile(first, n, left, right, BLOCK: tl.constexpr, SHIFTED: tl.constexpr):
    """Return the bounds of the keys of a tile of at most BLOCK queries from `first` on."""
    # Neither bound falls from a query to the next: the first and the last query have them.
    start, _ = keys_of(first, n, left, right, SHIFTED)
    _, end = keys_of(tl.minimum(first + BLOCK, n) - 1, n, left, right, SHIFTED)
    return start, end


@triton.jit
def queries_of_tile(first, n, left, right, BLOCK: tl.constexpr, SHIFTED: tl.constexpr):
    """Return the bounds of the queries that attend to a tile of at most BLOCK keys from `first`
    on."""
    start, _ = queries_of(first, n, left, right, SHIFTED)
    _, end = queries_of(tl.minimum(first + BLOCK, n) - 1, n, left, right, SHIFTED)
    return start, end


# The window along Y of a call with one dimension.
ONE = Window(0, 0, 1, False)


@dataclass(frozen=True)
class Problem:
    """The sizes, options and windows of a call."""

    batch: int
    heads: int
    key_heads: int
    Y: int
    X: int
    D: int
    scale: float
    y: Window
    x: Window

    @classmethod
    def of(cls, call: Any) -> Problem:
        batch, heads, *lengths, D = call.query.shape
        options = (call.kernel_size, call.dilation, call.is_causal, call.border)
        *above, x = windows(*options, len(lengths))
        scale = D**-0.5 if call.scale is None else call.scale
        Y, X = (1, *lengths)[-2:]
        # A dilation above the length has one position a class, as a dilation of the length has.
        y, x = (
            window._replace(dilation=min(window.dilation, length))
            for window, length in zip(((ONE, *above)[-1], x), (Y, X), strict=True)
        )
        return cls(batch, heads, call.key.shape[1], Y, X, D, scale, y, x)

    @property
    def classes(self) -> int:
        """The number of residue classes of positions (modulo the dilations)."""
        return self.y.dilation * self.x.dilation

    def tiles(self, block: int, window: Window, length: int) -> int:
        """Count the tiles of a residue class in one dimension, by the class with most positions."""
        return cdiv(cdiv(length, window.dilation), block)

    @property
    def arguments(self) -> tuple[int, ...]:
        """Scalar arguments of every kernel: sizes, dilations and windows."""
        y, x = self.y, self.x
        sizes = (self.heads, self.heads // self.key_heads, self.Y, self.X, self.D)
        return (*sizes, y.dilation, x.dilation, y.left, y.right, x.left, x.right)

    @property
    def constants(self) -> dict[str, bool]:
        """Constants of every kernel: which windows are shifted."""
        return {"SHIFTED_Y": self.y.shifted, "SHIFTED_X": self.x.shifted}


def plane(x: Tensor) -> Tensor:
    """Return x as (B, heads, Y, X, D) with unit stride in the last dimension: a view if
    possible."""
    return unit_stride(x if x.dim() == 5 else x.unsqueeze(2))


def strides(x: Tensor | None) -> tuple[int, ...]:
    """Return the strides over batch, heads, Y and X; 0 for an absent tensor."""
    return (0, 0, 0, 0) if x is None else x.stride()[:4]


def register(device: str, launch: Callable[..., None]) -> None:
    """Register a device's launch(kind, problem, tensors, strided, plan).

    `kind` is "forward", "query" for dquery or "key" for dkey and dvalue. Its kernel takes `tensors`
    and the strides of `strided`.
    """
    module = launch.__module__

    @library.kernel("neighborhood_attention_forward", device, module=module)
    def forward(call, y, lse, plan):
        strided = tuple(map(plane, (call.query, call.key, call.value, y)))
        launch("forward", Problem.of(call), (*strided, lse), strided, plan)

    @library.kernel("neighborhood_attention_backward", device, module=module)
    def backward(call, dquery, dkey, dvalue, plan):
        problem = Problem.of(call)
        dy, query, key, value, y = map(plane, (call.dy, call.query, call.key, call.value, call.y))
        dlse, lse = call.dlse.contiguous(), call.lse.contiguous()
        dq, dk, dv = (None if x is None else plane(x) for x in (dquery, dkey, dvalue))
        # The number that a softmax's gradient subtracts in each row: the query kernel writes it,
        # the key kernel reads it.
        delta = torch.empty_like(lse, dtype=torch.float32, memory_format=torch.contiguous_format)
        if dq is not None or dk is not None:
            tensors = (dy, dlse, query, key, value, y, lse, dq, delta)
            launch("query", problem, tensors, (dy, query, key, value, y, dq), plan)
        if dk is not None or dv is not None:
            tensors = (dy, query, key, value, lse, delta, dk, dv)
            launch("key", problem, tensors, (dy, query, key, value, dk, dv), plan)
