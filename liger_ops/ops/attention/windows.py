"""The windows of neighborhood attention, one dimension at a time.

A dilation of d splits the positions i of a dimension into d residue classes, i % d. A query attends
to positions of its own class only: each class is a dimension of its own, without dilation. Below,
p = i // d is a position within its class, and n the number of positions in the class.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

BORDERS = ("clipped", "shifted")

# For every position, the index of one neighbour, and whether that neighbour exists.
Slot = tuple[Tensor, Tensor]


class Window(NamedTuple):
    """The keys of the query at p.

    They are those from p - left to p + right that exist. If `shifted`, the window is moved until
    all its left + right + 1 keys exist.
    """

    left: int
    right: int
    dilation: int
    shifted: bool

    @property
    def size(self) -> int:
        return self.left + self.right + 1

    def keys(self, length: int, device: torch.device) -> Iterator[Slot]:
        """Yield one key of every query at a time, in a dimension of `length` positions."""
        residue, p, n = self._classes(length, device)
        first = p - self.left
        if self.shifted:
            first = torch.minimum(first.clamp(min=0), n - self.size)
        for slot in range(self.size):
            key = first + slot
            inside = (key >= 0) & (key < n)
            yield torch.where(inside, key, p) * self.dilation + residue, inside

    def queries(self, length: int, device: torch.device) -> Iterator[Slot]:
        """Yield one query of every key at a time: the queries whose windows hold the key."""
        residue, p, n = self._classes(length, device)
        first, last, slots = p - self.right, p + self.left, self.size
        if self.shifted:
            # The queries near a border have the same window: its keys have up to 2 * size - 1
            # queries.
            first = torch.where(p < self.size, 0, first)
            last = torch.where(p >= n - self.size, n - 1, last)
            slots = min(2 * self.size - 1, -(-length // self.dilation))
        for slot in range(slots):
            query = first + slot
            inside = (query >= 0) & (query < n) & (query <= last)
            yield torch.where(inside, query, p) * self.dilation + residue, inside

    def _classes(self, length: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        i = torch.arange(length, device=device)
        residue = i % self.dilation
        return residue, i // self.dilation, (length - 1 - residue) // self.dilation + 1


def per_dimension(values: Any, dims: int) -> list[Any]:
    """Return an option as a list with a value for each dimension."""
    values = list(values) if isinstance(values, Sequence) else [values]
    return values * dims if len(values) == 1 else values


def windows(
    kernel_size: Any, dilation: Any, is_causal: Any, border: str, dims: int
) -> list[Window]:
    """Return the window of each dimension."""
    options = (per_dimension(values, dims) for values in (kernel_size, dilation, is_causal))
    return [
        Window(size - 1, 0, d, False)
        if causal
        else Window(size // 2, (size - 1) // 2, d, border == "shifted")
        for size, d, causal in zip(*options, strict=True)
    ]


def slots(
    dimensions: Sequence[Window], lengths: Sequence[int], device: torch.device, of_keys: bool
) -> Iterator[Slot]:
    """Yield one key of every query at a time or, if `of_keys`, one query of every key.

    There are one or two dimensions. Indices are those of the flattened positions.
    """
    method = Window.queries if of_keys else Window.keys
    if len(dimensions) == 1:
        yield from method(dimensions[0], lengths[0], device)
        return
    columns = list(method(dimensions[1], lengths[1], device))
    for row, row_inside in method(dimensions[0], lengths[0], device):
        for column, column_inside in columns:
            index = row[:, None] * lengths[1] + column
            yield index.flatten(), (row_inside[:, None] & column_inside).flatten()
