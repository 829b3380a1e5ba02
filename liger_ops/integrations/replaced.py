"""Attributes of other projects' modules that an integration replaces, and puts back."""

from __future__ import annotations

from types import ModuleType
from typing import Any


class Replaced:
    """The replaced attributes; it is true while there are any."""

    def __init__(self) -> None:
        self._originals: list[tuple[ModuleType, str, Any]] = []

    def __bool__(self) -> bool:
        return bool(self._originals)

    def set(self, module: ModuleType, name: str, value: Any) -> None:
        """Replace an attribute that the module has."""
        self._originals.append((module, name, getattr(module, name)))
        setattr(module, name, value)

    def undo(self) -> None:
        """Put every original back."""
        while self._originals:
            setattr(*self._originals.pop())
