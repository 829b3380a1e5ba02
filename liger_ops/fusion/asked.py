"""Find code that asks for the class of a tensor or a module, where a stand-in has another class.

Deferred logits and the tensors of a trace are instances of a subclass of torch.Tensor, and a module
that is traced or fused is an instance of a subclass of its class. isinstance, issubclass and the
attributes of a class answer the same for a subclass. `type(x) is torch.Tensor` does not, and runs
no code that could notice the question. So the bytecode of the functions that are given a stand-in
is searched for it.
"""

from __future__ import annotations

import _lsprof
import dis
import sys
import types
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch

# Attributes of a class that its stand-in's class shares, and functions that only read these.
INHERITED = frozenset(("__name__", "__qualname__", "__module__", "__doc__"))
NAMES = frozenset(("str", "repr"))

# Functions that tell a tensor that overrides PyTorch's functions from a plain one.
OVERRIDES = frozenset(
    name for name in vars(torch.overrides) if name.startswith("has_torch_function")
)

# The name of a local variable, and the names of the attributes that lead from it to an object.
Question = tuple[str, tuple[str, ...]]

_SKIPPED = ("PUSH_NULL", "PRECALL", "CACHE", "EXTENDED_ARG", "COPY_FREE_VARS", "NOT_TAKEN")
_LIBRARIES = ("torch", "liger_ops")
_C_FUNCTIONS = (
    types.BuiltinFunctionType, types.MethodDescriptorType, types.MethodWrapperType,
    types.WrapperDescriptorType,
)  # fmt: skip
# The id of a code object -> the object, which keeps its id, and its questions. `watched` looks at
# every call, and the hash of a code object takes longer than all else that it does there.
_QUESTIONS: dict[int, tuple[types.CodeType, frozenset[Question]]] = {}


def questions(code: types.CodeType) -> frozenset[Question]:
    """Return the paths of the objects for whose class the code of a function asks."""
    known = _QUESTIONS.get(id(code))
    if known is None:
        known = _QUESTIONS[id(code)] = code, _questions(code)
    return known[1]


def _questions(code: types.CodeType) -> frozenset[Question]:
    paths, names = set(), code.co_names
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
            paths.add(path)
    return frozenset(paths)


def _is_for_its_name(steps: list[tuple[str, str]], i: int, end: int, attributes: int) -> bool:
    """Return whether the code only uses the name of the class for which it asks at step i."""
    if end < len(steps) and steps[end] in {("attribute", name) for name in INHERITED}:
        return True
    # The function before `x.y.__class__`, or before `type(x.y)`.
    start = i - 2 - attributes if steps[i] == ("attribute", "__class__") else i - 1
    is_called = end < len(steps) and steps[end] == ("other", "CALL")
    return is_called and start >= 0 and steps[start] in {("global", name) for name in NAMES}


def _loads(code: types.CodeType) -> Iterator[tuple[str, str]]:
    """Yield the instructions of a function, with the loads of locals, globals and attributes by
    name."""
    for instruction in dis.get_instructions(code):
        if instruction.opname in _SKIPPED:
            continue
        if instruction.opname.startswith(("LOAD_FAST", "LOAD_DEREF", "LOAD_CLASSDEREF")):
            names = (
                instruction.argval
                if isinstance(instruction.argval, tuple)
                else (instruction.argval,)
            )
            yield from (("local", name) for name in names)
        elif instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield "global", instruction.argval
        elif instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            yield "attribute", instruction.argval
        else:
            yield "other", "CALL" if instruction.opname.startswith("CALL") else instruction.opname


def _path_after(steps: list[tuple[str, str]], i: int) -> tuple[Question | None, int]:
    """Return the path of the object that is loaded from step i on, and the step after it."""
    while i < len(steps) and steps[i] == ("other", "BUILD_TUPLE"):
        i += 1
    if i >= len(steps) or steps[i][0] != "local":
        return None, i
    end = i + 1
    while end < len(steps) and steps[end][0] == "attribute":
        end += 1
    return (steps[i][1], tuple(name for _, name in steps[i + 1 : end])), end


def _path_before(steps: list[tuple[str, str]], i: int) -> Question | None:
    """Return the path of the object that is loaded before step i."""
    start = i - 1
    while start >= 0 and steps[start][0] == "attribute":
        start -= 1
    if start < 0 or steps[start][0] != "local":
        return None
    return steps[start][1], tuple(name for _, name in steps[start + 1 : i])


def is_library_code(frame: types.FrameType) -> bool:
    """Return whether the code of a frame is that of PyTorch or of this package."""
    return _is_of_library(frame.f_globals.get("__name__"))


def runs_library_code_alone(function: Any, classes: Collection[type], arguments: Any) -> bool:
    """Return whether a call with `__torch_function__` runs no code but that of PyTorch and of this
    package. `classes` are those of arguments with a `__torch_function__`."""
    if not isinstance(function, _C_FUNCTIONS) and not (
        isinstance(function, types.FunctionType) and _is_of_library(function.__module__)
    ):
        return False
    return all(_is_of_library(cls.__module__) for cls in classes) and not _has_code(arguments)


def _is_of_library(module: str | None) -> bool:
    return str(module).partition(".")[0] in _LIBRARIES


def _has_code(value: Any) -> bool:
    """Return whether the arguments of a call contain something that the call may call."""
    if isinstance(value, (tuple, list)):
        return any(map(_has_code, value))
    return any(map(_has_code, value.values())) if isinstance(value, dict) else callable(value)


def stand_in_asked(frame: types.FrameType, is_stand_in: Callable[[Any], bool]) -> Any:
    """Return the stand-in for whose class the code of a frame asks, or None."""
    paths = questions(frame.f_code)
    if (
        not paths
        or is_library_code(frame)
        or frame.f_globals.get("__name__") in sys.stdlib_module_names
    ):
        return None
    for name, path in paths:
        value = frame.f_locals.get(name)
        for attribute in path:
            value = getattr(value, attribute, None)
        if is_stand_in(value):
            return value
    return None


class _Watch:
    """A profile function that lists the stand-ins for whose class the code asks that runs."""

    def __init__(self, is_stand_in: Callable[[Any], bool], stand_ins: list[Any]) -> None:
        self.is_stand_in, self.stand_ins = is_stand_in, stand_ins

    def __call__(self, frame: types.FrameType, event: str, argument: Any) -> None:
        # The calls of C functions have other events. On a return, too: by then locals are set that
        # did not exist at the call.
        if event in ("call", "return"):
            stand_in = stand_in_asked(frame, self.is_stand_in)
            if stand_in is not None:
                self.stand_ins.append(stand_in)


@contextmanager
def watched(is_stand_in: Callable[[Any], bool], stand_ins: list[Any]) -> Iterator[None]:
    """Add to `stand_ins` each stand-in for whose class the code asks that runs in the body."""
    before: Any = sys.getprofile()
    sys.setprofile(_Watch(is_stand_in, stand_ins))
    try:
        yield
    finally:
        # Until Python 3.12, the profile function of cProfile is an object that no call can set.
        if isinstance(before, _lsprof.Profiler):
            sys.setprofile(None)
            before.enable()
        else:
            sys.setprofile(before)


@contextmanager
def unwatched() -> Iterator[None]:
    """Suspend `watched` in the body, which runs code of PyTorch and of this package alone.

    An operation on fake tensors makes about 3000 calls, each of which a profile function would see.
    """
    watch = sys.getprofile()
    if not isinstance(watch, _Watch):
        yield
        return
    sys.setprofile(None)
    try:
        yield
    finally:
        sys.setprofile(watch)
