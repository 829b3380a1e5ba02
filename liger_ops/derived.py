"""Ops derived from others: the signatures of `<op>_forward` and `<op>_backward`, whose definitions
take the call, and definitions of backward ops by autograd."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache, partial
from inspect import Parameter
from typing import Any, get_type_hints

import torch
from torch import Tensor

from .autograd import vector_jacobian
from .schemas import MASKS, definition_of_call, hide_keyword_only

Function = Callable[..., Any]
# Lays out a gradient: given the gradient and its argument.
Layout = Callable[[Tensor, Tensor], Tensor]
# Whether each gradient is computed: by the backward, and by the forward already.
MASK, FORWARD_MASK = "output_mask", "gradient_mask"


def contiguous(gradient: Tensor, argument: Tensor) -> Tensor:
    return gradient.contiguous()


def forward_definition(function: Function, public: Function, form: str) -> Function:
    """The definition of `<op>_forward`, from a function of its call.

    `form` lists the arguments: "..." are those of the public op that it does not name, and "-"
    leaves one out. Of the others, `return_<result>` asks for a result, `gradient_mask` for the
    gradients of a head's five tensors, and the rest are optional tensors.
    """
    known = _parameters(public)

    def added(name: str) -> Parameter:
        if name.startswith("return_"):
            return _parameter(name, bool, False)
        if name == FORWARD_MASK:
            return _parameter(name, MASKS[2], (False,) * 5)
        return _parameter(name, Tensor | None, None)

    parameters = _listed(form, known, list(known), added)
    inherited = ", ".join(name for name in parameters if name in known)
    text, returns, rest = inspect.cleandoc(function.__doc__ or "").partition("\n\nReturns:")
    text += "" if "\nArgs:" in text else "\n\nArgs:"
    text = text.replace("\nArgs:", f"\nArgs:\n    {inherited}: as for `{public.__name__}`.", 1)
    function.__doc__ = text + returns + rest
    return definition_of_call(function, parameters, get_type_hints(function)["return"])


def backward_definition(op: str, function: Function, form: str, forward: Function) -> Function:
    """The definition of `<op>_backward`, from a function of its call; `forward` is the definition
    of the op.

    `form` is "arguments -> results". The arguments are the gradients of the op's results; then its
    arguments and results, by their names, of which "..." are the options that are not named; and
    `output_mask`, which says for each result whether it is computed. The name of a result is "d"
    and the op's argument. "?" marks a tensor that may be None, "=" one that is None by default.
    """
    given, count, results = _of_backward(form, forward)
    result = tuple[(Tensor | None,) * len(results)] if MASK in given else Tensor  # type: ignore[misc]
    function.__name__ = function.__qualname__ = f"{op.removesuffix('_forward')}_backward"
    function.__doc__ = inspect.cleandoc(function.__doc__ or "") + _sections(
        op, list(given), count, results
    )
    return definition_of_call(function, given, result)


def gradient_by_autograd(function: Function, form: str, layout: Layout = contiguous) -> Function:
    """The gradient of `function`, from a call of its backward op: by autograd, in float32, and
    rounded once. Keyword arguments go on to the function."""
    given, count, results = _of_backward(form, function)
    parameters = _parameters(function)
    names = list(parameters)
    defaults = {name: parameters[name].default for name in names if name not in given}
    places = [names.index(result.removeprefix("d")) for result in results]

    def gradient(call: Any, **options: Any) -> Any:
        values = dict(zip(given, call, strict=True), **defaults)
        arguments = [values[name] for name in names]
        mask = values.get(MASK, [True])
        wanted = [
            i for i, needed in zip(places, mask, strict=True) if needed and arguments[i] is not None
        ]
        wide = [_widened(argument) for argument in arguments]
        found = vector_jacobian(partial(function, **options), wide, wanted, call[:count])
        gradients = dict.fromkeys(places)
        for i, gradient in zip(wanted, found, strict=True):
            argument = arguments[i]
            if gradient is None:
                gradient = torch.zeros_like(argument)
            # A copy: autograd may return an incoming gradient, or a tensor for two arguments.
            gradients[i] = layout(gradient.to(argument.dtype, copy=True), argument)
        return tuple(gradients.values()) if MASK in given else gradients[places[0]]

    gradient.__module__ = function.__module__
    gradient.__doc__ = "Autograd of the op's definition, in float32, rounded once."
    return gradient


def _of_backward(form: str, function: Function) -> tuple[dict[str, Parameter], int, list[str]]:
    """The parameters of a backward op, how many of them are gradients, and the names of its
    results."""
    given, results = form.split(" -> ")
    known = {name: _parameter(name, p.annotation) for name, p in _parameters(function).items()}
    tensors_and_masks = (Tensor, Tensor | None, MASKS[2])
    options = [
        name
        for name, p in known.items()
        if p.annotation not in tensors_and_masks and not name.startswith("return_")
    ]

    def added(token: str) -> Parameter:
        name = token.rstrip("?=")
        if name == MASK:
            return _parameter(name, list[bool])
        hint = Tensor if name == token else Tensor | None
        return _parameter(name, hint, None if "=" in token else Parameter.empty)

    parameters = _listed(given, known, options, added)
    count = next(i for i, n in enumerate(parameters) if n in known or not n.startswith("d"))
    return parameters, count, results.split()


@cache
def _parameters(function: Function) -> dict[str, Parameter]:
    """The parameters of a definition, with the types of its annotations."""
    hide_keyword_only(function)
    hints = get_type_hints(function)
    parameters = inspect.signature(function).parameters
    return {name: p.replace(annotation=hints[name]) for name, p in parameters.items()}


def _parameter(name: str, hint: Any, default: Any = Parameter.empty) -> Parameter:
    kind = Parameter.POSITIONAL_OR_KEYWORD
    return Parameter(name, kind, annotation=hint, default=default)


def _listed(
    form: str, known: dict[str, Parameter], rest: list[str], added: Callable[[str], Parameter]
) -> dict[str, Parameter]:
    """The parameters that a form lists: known ones, the rest of them for "...", and added ones."""
    tokens = form.split()
    named = {token.strip("-?=") for token in tokens}
    found: list[Parameter] = []
    for token in tokens:
        if token == "...":
            found += [known[name] for name in rest if name not in named]
        elif not token.startswith("-"):
            found.append(known[token] if token in known else added(token))
    return {parameter.name: parameter for parameter in found}


def _sections(op: str, given: list[str], count: int, results: list[str]) -> str:
    """The sections of a backward op's documentation."""
    names = [name for name in given if name != MASK]
    listed, public = ", ".join(results), op.removesuffix("_forward")
    of = ", ".join(result.removeprefix("d") for result in results)
    mask = f"\n    {MASK}: whether each of {listed} is computed and allocated."
    return f"""

Args:
    {", ".join(names[:count])}: the gradients of the results, of their shapes, any strides.
    {", ".join(names[count:])}: as given to `{op}`, or its results.{mask if MASK in given else ""}

Returns:
    {listed}: dense, of the shapes and dtypes of {of}; None where the argument is, or {MASK} leaves
        it out.

Raises:
    TypeError, ValueError: as `{public}`; or a gradient does not have the shape of its result.
"""


def _widened(value: Any) -> Any:
    """A floating-point tensor in the dtype of the arithmetic: float32, unless it is float64."""
    is_narrow = isinstance(value, Tensor) and value.is_floating_point()
    return value.float() if is_narrow and value.dtype is not torch.float64 else value
