"""Find code that asks for the class of a tensor or a module, where a stand-in has another.

Logits that are deferred and tensors of a trace are instances of a subclass of torch.Tensor, and a
module that is traced or fused of a subclass of its class. isinstance, issubclass and the attributes
of a class answer the same for a subclass; `type(x) is torch.Tensor` does not, and no code runs when
it is asked. The bytecode of the functions that are given a stand-in shows it.
"""

from __future__ import annotations

import dis
import functools
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

# A class's attributes that a subclass has too, and functions of them.
INHERITED = frozenset(("__name__", "__qualname__", "__module__", "__doc__"))
NAMES = frozenset(("str", "repr"))

# Functions that know a tensor that overrides PyTorch's functions from another.
OVERRIDES = frozenset(
    name for name in vars(torch.overrides) if name.startswith("has_torch_function")
)

# A local variable, and the names of attributes, that lead to an object.
Question = tuple[str, tuple[str, ...]]

_SKIPPED = ("PUSH_NULL", "PRECALL", "CACHE", "EXTENDED_ARG", "COPY_FREE_VARS", "NOT_TAKEN")
_OWN = ("torch", "liger_ops")


@functools.cache
def questions(code: types.CodeType) -> frozenset[Question]:
    """The objects for whose class the code of a function asks."""
    found, names = set(), code.co_names
    if not ("type" in names or "__class__" in names or OVERRIDES.intersection(names)):
        return frozenset()
    steps = list(_loads(code))
    for i, (kind, name) in enumerate(steps):
        if kind == "attribute" and name == "__class__":
            path, end = _path_before(steps, i), i + 1
        elif kind == "global" and (name == "type" or name in OVERRIDES):
            path, end = _path_after(steps, i + 1)
            if end < len(steps) and steps[end] == ("other", "CALL"):
                end += 1
        elif kind == "attribute" and name in OVERRIDES:
            path, end = _path_after(steps, i + 1)
        else:
            continue
        if path is not None and not _is_for_its_name(steps, i, end, len(path[1])):
            found.add(path)
    return frozenset(found)


def _is_for_its_name(steps: list[tuple[str, str]], i: int, end: int, attributes: int) -> bool:
    """Whether a class that is asked for at a place is only named."""
    if end < len(steps) and steps[end] in {("attribute", name) for name in INHERITED}:
        return True
    # The function before `x.y.__class__`, or before `type(x.y)`.
    start = i - 2 - attributes if steps[i] == ("attribute", "__class__") else i - 1
    is_called = end < len(steps) and steps[end] == ("other", "CALL")
    return is_called and start >= 0 and steps[start] in {("global", name) for name in NAMES}


def _loads(code: types.CodeType) -> Iterator[tuple[str, str]]:
    """The instructions of a function: loads of locals, globals and attributes by their names."""
    for one in dis.get_instructions(code):
        if one.opname in _SKIPPED:
            continue
        if one.opname.startswith(("LOAD_FAST", "LOAD_DEREF", "LOAD_CLASSDEREF")):
            names = one.argval if isinstance(one.argval, tuple) else (one.argval,)
            yield from (("local", name) for name in names)
        elif one.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield "global", one.argval
        elif one.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            yield "attribute", one.argval
        else:
            yield "other", "CALL" if one.opname.startswith("CALL") else one.opname


def _path_after(steps: list[tuple[str, str]], i: int) -> tuple[Question | None, int]:
    """The object that is loaded from a place on, and the place after that."""
    while i < len(steps) and steps[i] == ("other", "BUILD_TUPLE"):
        i += 1
    if i >= len(steps) or steps[i][0] != "local":
        return None, i
    end = i + 1
    while end < len(steps) and steps[end][0] == "attribute":
        end += 1
    return (steps[i][1], tuple(name for _, name in steps[i + 1 : end])), end


def _path_before(steps: list[tuple[str, str]], i: int) -> Question | None:
    """The object that is loaded up to a place."""
    start = i - 1
    while start >= 0 and steps[start][0] == "attribute":
        start -= 1
    if start < 0 or steps[start][0] != "local":
        return None
    return steps[start][1], tuple(name for _, name in steps[start + 1 : i])


def is_own(frame: types.FrameType) -> bool:
    """Whether the code of a frame is PyTorch's, or fuse's."""
    return str(frame.f_globals.get("__name__")).partition(".")[0] in _OWN


def asked(frame: types.FrameType, is_stand_in: Callable[[Any], bool]) -> Any:
    """The stand-in for whose class the code of a frame asks, or None."""
    found = questions(frame.f_code)
    if not found or is_own(frame) or frame.f_globals.get("__name__") in sys.stdlib_module_names:
        return None
    for name, path in found:
        one = frame.f_locals.get(name)
        for attribute in path:
            one = getattr(one, attribute, None)
        if is_stand_in(one):
            return one
    return None


@contextmanager
def watched(is_stand_in: Callable[[Any], bool], found: list[Any]) -> Iterator[None]:
    """Add to `found` the stand-ins for whose class code asks that runs in the body."""

    def look(frame: types.FrameType, event: str, argument: Any) -> None:
        if event in ("call", "return") and (one := asked(frame, is_stand_in)) is not None:
            found.append(one)

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        yield
    finally:
        sys.setprofile(before)
