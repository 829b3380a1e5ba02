"""Copies of functions that see other values under some global names."""

from __future__ import annotations

import functools
import itertools
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch


class Names:
    """Global names of a file and the values that they have now."""

    def __init__(self, scope: dict[str, Any], names: Iterable[str]) -> None:
        file = sys.modules.get(scope.get("__name__", ""))
        # Dynamo guards on the attributes of a module, and not on a dict.
        self._places = [(file, name, scope[name]) for name in names if file and vars(file) is scope]

    def add_functions(self, function: Any) -> None:
        """Add the global functions that a function and these call."""
        scope = getattr(function, "__globals__", {})
        for name in getattr(getattr(function, "__code__", None), "co_names", ()):
            value = scope.get(name)
            known = any(value is one for _, _, one in self._places)
            if isinstance(value, types.FunctionType) and not known:
                self._places += Names(scope, [name])._places
                self.add_functions(value)

    def are_unchanged(self) -> bool:
        return all(getattr(file, name, None) is value for file, name, value in self._places)


def global_names(code: types.CodeType) -> set[str]:
    """The names of globals and attributes in a function's code and in the functions within it."""
    inside = (one for one in code.co_consts if isinstance(one, types.CodeType))
    return set(code.co_names).union(*map(global_names, inside))


def rebound(function: Any, changes: Mapping[str, Callable[[Any], Any]]) -> Any:
    """A copy of a function, and of the functions that it wraps, over a copy of its globals.

    The innermost function refers to the names in `changes`. In the copy, each name is bound to what
    its change returns for the value that it has. Once the file binds one to another value, a call
    reaches the function itself.
    """
    scope, closure, inner = function.__globals__, function.__closure__, None
    own: dict[str, Any] = {}
    if not global_names(function.__code__).isdisjoint(changes):
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
    names = Names(scope, own)
    made = types.FunctionType(
        function.__code__, own_globals, function.__name__, function.__defaults__, closure
    )
    made.__kwdefaults__ = function.__kwdefaults__

    @functools.wraps(function)
    def copied(*args: Any, **kwargs: Any) -> Any:
        if not names.are_unchanged():
            return function(*args, **kwargs)
        if not torch.compiler.is_compiling():
            # Pick up names that the file has rebound since.
            own_globals.update(seen())
        return made(*args, **kwargs)

    if inner is not None:
        copied.__wrapped__ = inner
    return copied


def chain_to(function: Any, name: str) -> list[types.FunctionType]:
    """A function and those that it wraps, to the one that refers to a name, or none."""
    chain = wrapped(function)
    places = [i for i, one in enumerate(chain) if name in one.__code__.co_names]
    return chain[: places[0] + 1] if places else []


def opaque(chain: list[types.FunctionType]) -> types.FunctionType | None:
    """The wrapper that `rebound` cannot copy: it does not have what it wraps in its closure."""
    for outer, inner in itertools.pairwise(chain):
        if not any(cell.cell_contents is inner for cell in outer.__closure__ or ()):
            return outer
    return None


def wrapped(function: Any) -> list[types.FunctionType]:
    """A function and the functions that it wraps, from the outermost in."""
    found = []
    while isinstance(function, types.FunctionType) and function not in found:
        found.append(function)
        function = getattr(function, "__wrapped__", None)
    return found
