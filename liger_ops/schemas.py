"""Derive an op's schema, and the named tuple of its arguments, from its definition's signature."""

from __future__ import annotations

import functools
import inspect
from collections import namedtuple
from collections.abc import Callable, Mapping
from typing import Any, get_args, get_origin

import torch
from torch import Tensor

TYPES: dict[Any, str] = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    list[Tensor]: "Tensor[]",
    float: "float",
    float | None: "float?",
    int: "int",
    int | torch.SymInt: "SymInt",
    int | torch.SymInt | None: "SymInt?",
    int | None: "int?",
    bool: "bool",
    # One value for all dimensions, or a list with one for each. Schemas have this for ints alone:
    # bools are passed as ints.
    int | list[int]: "int[1]",
    bool | list[bool]: "int[1]",
    str: "str",
    list[int] | None: "int[]?",
    torch.dtype | None: "ScalarType?",
}
# One bool per gradient: a list in a call, and a tuple as a default value.
MASKS = (list[bool], list[bool] | tuple[bool, ...], tuple[bool, ...] | list[bool])


def schema_of(function: Callable[..., Any], returns: str = "") -> str:
    """Return the schema of a function, from its annotations; `returns` names its results.

    A mask has as many elements as its default value or, without one, as the function has results.
    """
    hints: dict[str, Any] = inspect.get_annotations(function, eval_str=True)
    result = hints["return"]
    results = get_args(result) if get_origin(result) is tuple else (result,)
    names = returns.split() or [""] * len(results)
    parameters = []
    for name, parameter in inspect.signature(function).parameters.items():
        has_default = parameter.default is not inspect.Parameter.empty
        if hints[name] in MASKS:
            type_ = f"bool[{len(parameter.default) if has_default else len(results)}]"
        else:
            type_ = _type(function, name, hints[name])
        default = ""
        if has_default:
            value = parameter.default
            if type_ == "int[1]":
                value = int(value)
            default = f"={list(value) if isinstance(value, tuple) else value!r}"
        parameters.append(f"{type_} {name}{default}")
    outputs = [f"{TYPES[hint]} {name}".strip() for hint, name in zip(results, names, strict=True)]
    single = len(outputs) == 1 and not returns
    return f"({', '.join(parameters)}) -> " + (outputs[0] if single else f"({', '.join(outputs)})")


def hide_keyword_only(function: Callable[..., Any]) -> None:
    """Remove keyword-only parameters from the signature that `inspect` returns for the function."""
    signature = inspect.signature(function)
    kept = [p for p in signature.parameters.values() if p.kind is not p.KEYWORD_ONLY]
    function.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]


def definition_of_call(
    function: Callable[..., Any], parameters: Mapping[str, inspect.Parameter], result: Any
) -> Callable[..., Any]:
    """Return a function that has these parameters, and calls `function` with the call, a named
    tuple of its arguments. Other keyword arguments are passed on to `function`."""
    listed = list(parameters.values())
    defaults = [p.default for p in listed if p.default is not p.empty]
    arguments = namedtuple(function.__name__, list(parameters), defaults=defaults)  # type: ignore[misc]

    @functools.wraps(function)
    def definition(*args: Any, **kwargs: Any) -> Any:
        options = {name: kwargs.pop(name) for name in kwargs.keys() - parameters.keys()}
        return function(arguments(*args, **kwargs), **options)

    definition.__signature__ = inspect.Signature(listed)  # type: ignore[attr-defined]
    definition.__annotations__ = {name: p.annotation for name, p in parameters.items()}
    definition.__annotations__["return"] = result
    return definition


def _type(function: Callable[..., Any], name: str, hint: Any) -> str:
    if hint not in TYPES:
        accepted = ", ".join(getattr(type_, "__name__", str(type_)) for type_ in TYPES)
        raise TypeError(
            f"{function.__name__}: {name} must be annotated with one of {accepted}, got {hint}"
        )
    return TYPES[hint]


def arguments_of(name: str, schema: Any) -> type[Any]:
    """Return the type of an op's call: a named tuple of its arguments, with the schema's defaults.

    Its name is the op's public name, without `_forward`, for error messages.
    """
    arguments = schema.arguments
    defaults = [a.default_value for a in arguments if a.has_default_value()]
    names = [argument.name for argument in arguments]
    return namedtuple(name.removesuffix("_forward"), names, defaults=defaults)
