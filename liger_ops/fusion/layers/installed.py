"""The method that runs a program in the place of a module's code."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..assumptions import Assumptions
from .program import CAST, FUNCTION, INDEX, OP, Parameter, Program, Step, Value

# A function that calls an op, and returns None where that does not compute what the code does.
Called = Callable[..., Any]
# A step of a module, of the values before it.
Run = Callable[[Any, list[Any]], Any]


@dataclass(frozen=True)
class Facts:
    """What replaces a module's code, and under which assumptions. `form` is what else a kind needs
    to know of a call."""

    program: Program
    form: Any
    assumptions: Assumptions


def methods_of(
    name: str, caller: Callable[[Facts, Step, int], Called], base: Any, facts: Facts
) -> dict[str, Any]:
    """The method `name` of a module's class, replaced."""
    original, program, hold = getattr(base, name), facts.program, facts.assumptions.hold
    names = program.arguments
    parameters = inspect.signature(original).parameters
    defaults = {
        one: parameters[one].default
        for one in names
        if parameters[one].default is not inspect.Parameter.empty
    }
    used = [one in program.used for one in names]
    ops = [caller(facts, op, i) for i, op in enumerate(program.ops)][::-1]
    steps = [_run(step, ops.pop() if step.kind == OP else None) for step in program.steps]
    returned = program.returned
    last = returned.index if isinstance(returned, Value) else None
    indices = [one.index for one in returned] if isinstance(returned, tuple) else []

    def arranged(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
        """The arguments of a call by position, or None for a call that the code has to judge."""
        given = {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
        doubled = any(one in names[: len(args)] for one in kwargs)
        if len(args) > len(names) or len(given) != len(names) or doubled:
            return None
        found = tuple([given.get(one) for one in names])
        return found if all(one in given for one in names) else None

    def is_usual(given: tuple[Any, ...]) -> bool:
        """Whether a call has the arguments that the program uses, and no others."""
        return [one is not None for one in given] == used

    @functools.wraps(original)
    def replaced(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = arranged(args, kwargs) if kwargs or len(args) != len(names) else args
        if given is None or not is_usual(given) or not hold(self, given[0]):
            return original(self, *args, **kwargs)
        values = [*given]
        for run in steps:
            value = run(self, values)
            if value is None:
                return original(self, *args, **kwargs)
            values.append(value)
        return values[last] if last is not None else tuple([values[i] for i in indices])

    return {name: replaced}


def _run(step: Step, op: Called | None) -> Run:
    by_value = [(i, one.index) for i, one in enumerate(step.args) if isinstance(one, Value)]
    by_path = [(i, *one.path) for i, one in enumerate(step.args) if isinstance(one, Parameter)]
    constants = [None if isinstance(one, (Value, Parameter)) else one for one in step.args]
    count, keywords = len(step.args) - len(step.keywords), step.keywords
    function = _function(step.name) if step.kind == FUNCTION else None

    def run(module: Any, values: list[Any]) -> Any:
        args = [*constants]
        for i, index in by_value:
            args[i] = values[index]
        for i, holder, name in by_path:
            args[i] = getattr(getattr(module, holder) if holder else module, name)
        if op is not None:
            return op(*args)
        called = getattr(module, step.name) if function is None else function
        found = called(*args[:count], **dict(zip(keywords, args[count:], strict=True)))
        return None if function is None and not isinstance(found, Tensor) else found

    return run


def _function(name: str) -> Called:
    """The function of a step: of torch, or one of those that have no name there."""
    if name == CAST:
        return lambda source, x: source.to(x.dtype)
    if name == INDEX:
        return _item
    function: Called = getattr(torch, name, None) or getattr(F, name)
    return function


def _item(source: Any, *parts: Any) -> Any:
    index = tuple([slice(None) if part == ":" else part for part in parts])
    return source[index if len(index) > 1 else index[0]]
