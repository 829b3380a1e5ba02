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
from .program import CAST, CHILD, FUNCTION, INDEX, OP, TUPLE, Parameter, Program, Step, Value

# A function that calls an op, and returns None where that does not compute what the code does.
Called = Callable[..., Any]


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
    used = [one in program.used for one in program.arguments]
    arranged, run = arranging(original, program.arguments), running(facts, caller)

    @functools.wraps(original)
    def replaced(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = arranged(args, kwargs) if kwargs or len(args) != len(used) else args
        if given is None or [one is not None for one in given] != used or not hold(self, given[0]):
            return original(self, *args, **kwargs)
        result = run(self, given)
        return original(self, *args, **kwargs) if result is None else result

    return {name: replaced}


def arranging(
    function: Any, names: tuple[str, ...]
) -> Callable[[tuple[Any, ...], dict[str, Any]], tuple[Any, ...] | None]:
    """A function that arranges the arguments of a call of `function` by position: None for a call
    that its code has to judge."""
    parameters = inspect.signature(function).parameters
    defaults = {
        one: parameters[one].default
        for one in names
        if parameters[one].default is not inspect.Parameter.empty
    }
    needed, ends = len(names) - len(defaults), tuple(defaults.values())

    def arranged(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
        if not kwargs and needed <= len(args) <= len(names):
            return (*args, *ends[len(args) - needed :])
        given = {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
        doubled = any(one in names[: len(args)] for one in kwargs)
        if len(args) > len(names) or len(given) != len(names) or doubled:
            return None
        found = tuple([given.get(one) for one in names])
        return found if all(one in given for one in names) else None

    return arranged


def running(
    facts: Facts, caller: Callable[[Facts, Step, int], Called]
) -> Callable[[Any, tuple[Any, ...]], Any]:
    """A function that runs a program for a module and arguments: None where an op does not compute
    what the code does."""
    paths, constants, steps, returned = _laid_out(facts, caller)
    is_one = isinstance(facts.program.returned, Value)

    def run(module: Any, given: tuple[Any, ...]) -> Any:
        held = [
            getattr(getattr(module, of), one) if of else module._parameters.get(one)
            for of, one in paths
        ]
        values = [module, *given, *held, *constants]
        for call, indices in steps:
            value = call(*[values[i] for i in indices])
            if value is None:
                return None
            values.append(value)
        return values[returned[0]] if is_one else tuple([values[i] for i in returned])

    return run


def _laid_out(facts: Facts, caller: Callable[[Facts, Step, int], Called]) -> tuple[Any, ...]:
    """The paths of parameters, the constants, the steps and the results of a program, whose values
    are: the module, its arguments, parameters, constants, and the results of steps."""
    program = facts.program
    given = [one for step in program.steps for one in _arguments(step)]
    inputs = list(dict.fromkeys(one.path for one in given if isinstance(one, Parameter)))
    constants = [one for one in given if not isinstance(one, (Value, Parameter))]
    first = 1 + len(program.arguments)
    places = iter(range(first + len(inputs), first + len(inputs) + len(constants)))

    def place(one: Any) -> int:
        if isinstance(one, Parameter):
            return first + inputs.index(one.path)
        if isinstance(one, Value):
            is_argument = one.index < len(program.arguments)
            return 1 + one.index + (0 if is_argument else len(inputs) + len(constants))
        return next(places)

    steps, ops = [], iter(enumerate(program.ops))
    for step in program.steps:
        call = caller(facts, step, next(ops)[0]) if step.kind == OP else _call(step)
        module = [0] if step.kind in (CHILD, TUPLE) else []
        steps.append((call, [*module, *map(place, _arguments(step))]))
    returned = program.returned if isinstance(program.returned, tuple) else (program.returned,)
    return inputs, constants, steps, [place(one) for one in returned]


def _arguments(step: Step) -> tuple[Any, ...]:
    is_item = step.kind == FUNCTION and step.name == INDEX
    return step.args[:1] if is_item else step.args


def _call(step: Step) -> Called:
    """What a step calls that is no op, of a module for a child."""
    count, keywords = len(step.args) - len(step.keywords), step.keywords
    if step.kind in (CHILD, TUPLE):
        wanted = Tensor if step.kind == CHILD else tuple

        def of_child(module: Any, *args: Any) -> Any:
            child = getattr(module, step.name)
            if keywords:
                named = dict(zip(keywords, args[count:], strict=True))
                found = child(*args[:count], **named)
            else:
                found = child(*args)
            return found if isinstance(found, wanted) else None

        return of_child
    if step.name == CAST:
        return lambda source, x: source.to(x.dtype)
    if step.name == INDEX:
        parts = tuple(slice(None) if part == ":" else part for part in step.args[1:])
        index = parts if len(parts) > 1 else parts[0]
        return lambda source: source[index]
    owner = next(one for one in (torch, F, Tensor) if hasattr(one, step.name))
    function: Called = getattr(owner, step.name)
    if not keywords:
        return function
    return lambda *args: function(*args[:count], **dict(zip(keywords, args[count:], strict=True)))
