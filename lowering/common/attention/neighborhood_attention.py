"""The arguments of neighborhood attention's kernels, for every device.

A kernel has two dimensions of positions, Y and X; one dimension is a Y of 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ....ops.attention.windows import Window, windows
from ..sizes import cdiv

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
        # A dilation of more than the length has a class for every position, as the length has.
        y, x = (
            window._replace(dilation=min(window.dilation, length))
            for window, length in zip(((ONE, *above)[-1], x), (Y, X), strict=True)
        )
        return cls(batch, heads, call.key.shape[1], Y, X, D, scale, y, x)

    @property
    def classes(self) -> int:
        """The residue classes of positions."""
        return self.y.dilation * self.x.dilation

    def tiles(self, block: int, window: Window, length: int) -> int:
        """The tiles of a residue class in one dimension."""
        return cdiv(cdiv(length, window.dilation), block)

    @property
    def arguments(self) -> tuple[int, ...]:
        """Arguments of every kernel: sizes, dilations and windows."""
        y, x = self.y, self.x
        sizes = (self.heads, self.heads // self.key_heads, self.Y, self.X, self.D)
        return (*sizes, y.dilation, x.dilation, y.left, y.right, x.left, x.right)

    @property
    def constants(self) -> dict[str, bool]:
        """Constants of every kernel: which windows are shifted."""
        return {"SHIFTED_Y": self.y.shifted, "SHIFTED_X": self.x.shifted}


def plane(x: Tensor) -> Tensor:
    """(B, heads, Y, X, D) with unit stride in the last dimension: a view if possible."""
    x = x if x.dim() == 5 else x.unsqueeze(2)
    return x if x.stride(-1) == 1 else x.contiguous()


def strides(x: Tensor | None) -> tuple[int, ...]:
    return (0, 0, 0, 0) if x is None else x.stride()[:4]


def optional_plane(x: Tensor | None) -> Tensor | None:
    return None if x is None else plane(x)


def new_delta(lse: Tensor) -> Tensor:
    """What a softmax's gradient subtracts in each row, of lse's shape."""
    return torch.empty_like(lse, dtype=torch.float32, memory_format=torch.contiguous_format)
