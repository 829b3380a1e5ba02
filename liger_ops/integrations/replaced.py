"""Replacing attributes of other projects' modules, and restoring them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any


class Replaced:
    """A list of replaced attributes, with their original values; true while there are any."""

    def __init__(self) -> None:
        self._restore: list[Callable[[], None]] = []

    def __bool__(self) -> bool:
        return bool(self._restore)

    def set(self, module: ModuleType, name: str, value: Any) -> None:
        """Replace an existing attribute of the module."""
        original = getattr(module, name)
        self._restore.append(lambda: setattr(module, name, original))
        setattr(module, name, value)

    def everywhere(self, package: str, original: Any, value: Any) -> None:
        """Replace an object in every loaded module of the package, whatever its name there.

        `undo` also restores it in modules that were loaded since, which imported the value.
        """
        self._restore.append(lambda: _exchange(package, value, original))
        _exchange(package, original, value)

    def undo(self) -> None:
        """Restore every attribute, the last one first."""
        while self._restore:
            self._restore.pop()()


def _exchange(package: str, original: Any, value: Any) -> None:
    for name, module in list(sys.modules.items()):
        if f"{name}.".startswith(f"{package}.") and isinstance(module, ModuleType):
            for attribute in [key for key, held in vars(module).items() if held is original]:
                setattr(module, attribute, value)
