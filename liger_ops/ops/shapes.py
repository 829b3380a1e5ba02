"""Comparing shapes with data-dependent (unbacked) sizes."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def equal(shape: Sequence[int], expected: Sequence[int], name: str) -> bool:
    """Return whether two shapes are equal.

    Tracing cannot compare data-dependent sizes, such as those of `x[mask]` and `target[mask]`. They
    count as equal here, and the compiled graph asserts that they are.
    """
    try:
        return tuple(shape) == tuple(expected)
    except RuntimeError:
        if len(shape) != len(expected):
            return False
        for size, wanted in zip(shape, expected, strict=True):
            torch._check_value(size == wanted, lambda: f"{name} has another shape than expected")
        return True
