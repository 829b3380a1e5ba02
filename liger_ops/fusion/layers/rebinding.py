"""Copy functions so that some of their global names have other values."""

from __future__ import annotations

import functools
import itertools
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch


class GlobalValues:
    """Global names of a file and the values that they had at this object's creation."""

    def __init__(self, scope: dict[str, Any], names: Iterable[str]) -> None:
        module = sys.modules.get(scope.get("__name__", ""))
        # By attributes of the module, because Dynamo guards on these, and not on items of a dict.
        self._bindings = [
            (module, name, scope[name]) for name in names if module and vars(module) is scope
        ]

    def add_functions(self, function: Any) -> None:
        """Add the global functions that a function calls, and those that they call in turn."""
        scope = getattr(function, "__globals__", {})
        for name in getattr(getattr(function, "__code__", None), "co_names", ()):
            value = scope.get(name)
            is_known = any(value is known for _, _, known in self._bindings)
            if isinstance(value, types.FunctionType) and not is_known:
                self._bindings += GlobalValues(scope, [name])._bindings
                self.add_functions(value)

    def are_unchanged(self) -> bool:
        return all(getattr(module, name, None) is value for module, name, value in self._bindings)


def global_names(code: types.CodeType) -> set[str]:
    """Return the names of globals and attributes in a function's code and its nested functions."""
    inside = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return set(code.co_names).union(*map(global_names, inside))


def rebound(function: Any, changes: Mapping[str, Callable[[Any], Any]]) -> Any:
    """Copy a function, and the functions that it wraps, over a copy of its globals.

    The innermost function refers to the names in `changes`. In the copy, each name is bound to the
    result of its change, a function of the current value. Once the file binds such a name to
    another value, calls of the copy reach the function itself.
    """
    scope, closure, inner = function.__globals__, function.__closure__, None
    changed: dict[str, Any] = {}
    if not global_names(function.__code__).isdisjoint(changes):
        changed = {name: change(scope[name]) for name, change in changes.items() if name in scope}
    else:
        inner = rebound(function.__wrapped__, changes)
        closure = tuple(
            types.CellType(inner) if cell.cell_contents is function.__wrapped__ else cell
            for cell in closure
        )

    def current_globals() -> dict[str, Any]:
        # With `__name__`, Dynamo would find the module by it and guard on the file's own function.
        values = {**scope, **changed}
        values.pop("__name__", None)
        return values

    own_globals = current_globals()
    names = GlobalValues(scope, changed)
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
            own_globals.update(current_globals())
        return made(*args, **kwargs)

    if inner is not None:
        copied.__wrapped__ = inner
    return copied


def chain_to(function: Any, name: str) -> list[types.FunctionType]:
    """Return a function and those that it wraps, down to the first one that refers to a name, or
    [] if none does."""
    chain = wrapped(function)
    places = [i for i, link in enumerate(chain) if name in link.__code__.co_names]
    return chain[: places[0] + 1] if places else []


def opaque(chain: list[types.FunctionType]) -> types.FunctionType | None:
    """Return the first wrapper that `rebound` cannot copy, because the function that it wraps is
    not in its closure, or None."""
    for outer, inner in itertools.pairwise(chain):
        if not any(cell.cell_contents is inner for cell in outer.__closure__ or ()):
            return outer
    return None


def wrapped(function: Any) -> list[types.FunctionType]:
    """Return a function and the functions that it wraps, from the outermost in."""
    chain = []
    while isinstance(function, types.FunctionType) and function not in chain:
        chain.append(function)
        function = getattr(function, "__wrapped__", None)
    return chain
