"""Checks of the modules' arguments."""

from __future__ import annotations

from numbers import Integral


def check_size(owner: str, name: str, size: int) -> None:
    if not isinstance(size, Integral):
        raise TypeError(f"{owner}: {name} must be an int, got {type(size).__name__}")
    if size < 1:
        raise ValueError(f"{owner}: {name} must be at least 1, got {size}")
