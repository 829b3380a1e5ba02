"""Shapes that may have sizes that only the data gives."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def equal(shape: Sequence[int], expected: Sequence[int], name: str) -> bool:
    """Whether two shapes are equal. If tracing cannot know, as for `x[mask]` and `target[mask]`,
    the compiled graph asserts it."""
    try:
        return tuple(shape) == tuple(expected)
    except RuntimeError:
        if len(shape) != len(expected):
            return False
        for size, wanted in zip(shape, expected, strict=True):
            torch._check_value(size == wanted, lambda: f"{name} has another shape than expected")
        return True
