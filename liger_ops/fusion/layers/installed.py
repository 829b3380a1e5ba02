"""Create the method that runs a program in the place of a module's code."""

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
from .program import CAST, CHILD, FUNCTION, INDEX, OP, TUPLE, Parameter, Program, ProgramStep, Value

# A function that calls an op. It returns None for a call that the module's own code has to compute.
OpCaller = Callable[..., Any]


@dataclass(frozen=True)
class ModuleFacts:
    """The program that replaces a module's code, and the assumptions under which it does.

    `details` are the kind's own facts, such as the width of a norm.
    """

    program: Program
    details: Any
    assumptions: Assumptions


def methods_of(
    name: str,
    caller: Callable[[ModuleFacts, ProgramStep, int], OpCaller],
    base: Any,
    facts: ModuleFacts,
) -> dict[str, Any]:
    """Return the method `name` of a module's class, replaced by one that runs the program.

    The module's own code runs if the arguments differ from the traced ones in which are given, if
    an assumption does not hold, or if an op's caller returns None.
    """
    original, program, hold = getattr(base, name), facts.program, facts.assumptions.hold
    used = [value in program.used for value in program.arguments]
    arranged, run = argument_arranger(original, program.arguments), program_runner(facts, caller)

    @functools.wraps(original)
    def replaced(self: Any, *args: Any, **kwargs: Any) -> Any:
        arguments = arranged(args, kwargs) if kwargs or len(args) != len(used) else args
        if (
            arguments is None
            or [value is not None for value in arguments] != used
            or not hold(self, arguments[0])
        ):
            return original(self, *args, **kwargs)
        result = run(self, arguments)
        return original(self, *args, **kwargs) if result is None else result

    return {name: replaced}


def argument_arranger(
    function: Any, names: tuple[str, ...]
) -> Callable[[tuple[Any, ...], dict[str, Any]], tuple[Any, ...] | None]:
    """Return a function of (args, kwargs) that puts the arguments of a call of `function` in the
    order of `names`. It returns None for a call that `function` itself has to handle, or refuse."""
    parameters = inspect.signature(function).parameters
    defaults = {
        name: parameters[name].default
        for name in names
        if parameters[name].default is not inspect.Parameter.empty
    }
    needed, default_values = len(names) - len(defaults), tuple(defaults.values())

    def arranged(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
        if not kwargs and needed <= len(args) <= len(names):
            return (*args, *default_values[len(args) - needed :])
        given = {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
        is_given_twice = any(name in names[: len(args)] for name in kwargs)
        if len(args) > len(names) or len(given) != len(names) or is_given_twice:
            return None
        found = tuple([given.get(name) for name in names])
        return found if all(name in given for name in names) else None

    return arranged


def program_runner(
    facts: ModuleFacts, caller: Callable[[ModuleFacts, ProgramStep, int], OpCaller]
) -> Callable[[Any, tuple[Any, ...]], Any]:
    """Return a function that runs a program for a module and arguments. It returns None if an op's
    caller does, or if a child returns something else than in the trace."""
    paths, constants, steps, returned = _compiled_steps(facts, caller)
    is_single = isinstance(facts.program.returned, Value)

    def run(module: Any, arguments: tuple[Any, ...]) -> Any:
        parameters = [
            getattr(getattr(module, holder), name) if holder else module._parameters.get(name)
            for holder, name in paths
        ]
        values = [module, *arguments, *parameters, *constants]
        for call, indices in steps:
            value = call(*[values[i] for i in indices])
            if value is None:
                return None
            values.append(value)
        return values[returned[0]] if is_single else tuple([values[i] for i in returned])

    return run


def _compiled_steps(
    facts: ModuleFacts, caller: Callable[[ModuleFacts, ProgramStep, int], OpCaller]
) -> tuple[Any, ...]:
    """Lay out the values of a program in one list, and return its parts with positions in it.

    The list holds the module, its arguments, parameters, constants, and the results of the steps.
    Returned are the paths of the parameters, the constants, the steps, each a function and the
    positions of its arguments, and the positions of the results.
    """
    program = facts.program
    arguments = [argument for step in program.steps for argument in _tensor_arguments(step)]
    parameters = list(
        dict.fromkeys(argument.path for argument in arguments if isinstance(argument, Parameter))
    )
    constants = [argument for argument in arguments if not isinstance(argument, (Value, Parameter))]
    first = 1 + len(program.arguments)
    constant_positions = iter(
        range(first + len(parameters), first + len(parameters) + len(constants))
    )

    def position(argument: Any) -> int:
        if isinstance(argument, Parameter):
            return first + parameters.index(argument.path)
        if isinstance(argument, Value):
            is_argument = argument.index < len(program.arguments)
            return 1 + argument.index + (0 if is_argument else len(parameters) + len(constants))
        return next(constant_positions)

    steps, ops = [], iter(enumerate(program.ops))
    for step in program.steps:
        call = caller(facts, step, next(ops)[0]) if step.kind == OP else _callable_of(step)
        module = [0] if step.kind in (CHILD, TUPLE) else []
        steps.append((call, [*module, *map(position, _tensor_arguments(step))]))
    returned = program.returned if isinstance(program.returned, tuple) else (program.returned,)
    return parameters, constants, steps, [position(argument) for argument in returned]


def _tensor_arguments(step: ProgramStep) -> tuple[Any, ...]:
    is_item = step.kind == FUNCTION and step.name == INDEX
    return step.args[:1] if is_item else step.args


def _callable_of(step: ProgramStep) -> OpCaller:
    """Return the callable for a step that is not an op: a child of the module, which is its first
    argument then, a cast, an index or a function of torch."""
    count, keywords = len(step.args) - len(step.keywords), step.keywords
    if step.kind in (CHILD, TUPLE):
        wanted = Tensor if step.kind == CHILD else tuple

        def of_child(module: Any, *args: Any) -> Any:
            child = getattr(module, step.name)
            if keywords:
                named = dict(zip(keywords, args[count:], strict=True))
                result = child(*args[:count], **named)
            else:
                result = child(*args)
            return result if isinstance(result, wanted) else None

        return of_child
    if step.name == CAST:
        return lambda source, x: source.to(x.dtype)
    if step.name == INDEX:
        parts = tuple(slice(None) if part == ":" else part for part in step.args[1:])
        index = parts if len(parts) > 1 else parts[0]
        return lambda source: source[index]
    owner = next(one for one in (torch, F, Tensor) if hasattr(one, step.name))
    function: OpCaller = getattr(owner, step.name)
    if not keywords:
        return function
    return lambda *args: function(*args[:count], **dict(zip(keywords, args[count:], strict=True)))
