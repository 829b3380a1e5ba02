"""Copies of functions that see other values under some global names."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch


def rebound(function: Any, changes: Mapping[str, Callable[[Any], Any]]) -> Any:
    """A copy of a function, and of the functions that it wraps, over a copy of its globals.

    The innermost function refers to the names in `changes`. In the copy, each name is bound to what
    its change returns for the value that it has.
    """
    scope, closure, inner = function.__globals__, function.__closure__, None
    own = {}
    if any(name in function.__code__.co_names for name in changes):
        own = {name: change(scope[name]) for name, change in changes.items() if name in scope}
    else:
        inner = rebound(function.__wrapped__, changes)
        closure = tuple(
            types.CellType(inner) if cell.cell_contents is function.__wrapped__ else cell
            for cell in closure
        )

    def seen() -> dict[str, Any]:
        # With `__name__`, Dynamo would find the module by it and guard on the file's own function.
        found = {**scope, **own}
        found.pop("__name__", None)
        return found

    own_globals = seen()
    made = types.FunctionType(
        function.__code__, own_globals, function.__name__, function.__defaults__, closure
    )
    made.__kwdefaults__ = function.__kwdefaults__

    @functools.wraps(function)
    def copied(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            # Pick up names that the file has rebound since.
            own_globals.update(seen())
        return made(*args, **kwargs)

    if inner is not None:
        copied.__wrapped__ = inner
    return copied


def is_wrapped_plainly(function: Any) -> bool:
    """Whether `rebound` can copy a function: each wrapper has what it wraps in its closure."""
    while hasattr(function, "__wrapped__"):
        inner = function.__wrapped__
        if not any(cell.cell_contents is inner for cell in function.__closure__ or ()):
            return False
        function = inner
    return True
