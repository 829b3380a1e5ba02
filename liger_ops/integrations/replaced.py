"""Replacing attributes of other projects' modules, and restoring them."""

from __future__ import annotations

from types import ModuleType
from typing import Any


class Replaced:
    """A list of replaced attributes, with their original values; true while there are any."""

    def __init__(self) -> None:
        self._originals: list[tuple[ModuleType, str, Any]] = []

    def __bool__(self) -> bool:
        return bool(self._originals)

    def set(self, module: ModuleType, name: str, value: Any) -> None:
        """Replace an existing attribute of the module."""
        self._originals.append((module, name, getattr(module, name)))
        setattr(module, name, value)

    def undo(self) -> None:
        """Restore every attribute, the last one first."""
        while self._originals:
            setattr(*self._originals.pop())
