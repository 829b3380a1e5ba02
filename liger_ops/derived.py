"""Definitions of backward ops, derived from the definitions of their ops by autograd."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, get_type_hints

import torch
from torch import Tensor

from .autograd import vector_jacobian
from .schemas import hide_keyword_only

# Lays out a gradient: given the gradient and its argument.
Layout = Callable[[Tensor, Tensor], Tensor]
MASK = "output_mask"


def contiguous(gradient: Tensor, argument: Tensor) -> Tensor:
    return gradient.contiguous()


def derived_definition(
    op: str, function: Callable[..., Any], form: str, layout: Layout = contiguous
) -> Callable[..., Any]:
    """The definition of `<op>_backward`: autograd of `function`, in float32, rounded once.

    `form` is "arguments -> results". The arguments are the gradients of the function's results, of
    which "?" marks those that may be None; then arguments of the function and results of the op, by
    their names; and `output_mask`, which says for each result whether it is computed. The name of a
    result is "d" and the function's argument. Keyword arguments go on to the function.
    """
    given, results = (part.split() for part in form.split(" -> "))
    optional = [name for name in given if name.endswith("?")]
    given = [name.removesuffix("?") for name in given]
    hide_keyword_only(function)
    parameters, hints = inspect.signature(function).parameters, get_type_hints(function)
    names = list(parameters)
    defaults = {name: parameters[name].default for name in names if name not in given}
    count = next(i for i, name in enumerate(given) if name in parameters)
    places = [names.index(result.removeprefix("d")) for result in results]

    def definition(*call: Any, **options: Any) -> Any:
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

    types: dict[str, Any] = {name: hints.get(name, Tensor) for name in given}
    types |= dict.fromkeys((name.removesuffix("?") for name in optional), Tensor | None)
    types |= {MASK: list[bool]} if MASK in given else {}
    result = tuple[(Tensor | None,) * len(results)] if MASK in given else Tensor  # type: ignore[misc]
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    definition.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(name, kind, annotation=types[name]) for name in given]
    )
    definition.__annotations__ = {**types, "return": result}
    definition.__name__ = definition.__qualname__ = f"{op.removesuffix('_forward')}_backward"
    definition.__module__ = function.__module__
    definition.__doc__ = _documentation(op, given, count, results, layout is contiguous)
    return definition


def _documentation(op: str, given: list[str], count: int, results: list[str], dense: bool) -> str:
    saved = ", ".join(name for name in given[count:] if name != MASK)
    of = ", ".join(result.removeprefix("d") for result in results)
    listed, public = ", ".join(results), op.removesuffix("_forward")
    mask = f"\n        {MASK}: whether each of {listed} is computed and allocated."
    return f"""The gradient of `{public}`, which autograd derives from its definition.

    It is computed in float32, and rounded once.

    Args:
        {", ".join(given[:count])}: the gradients of the results, of their shapes, any strides.
        {saved}: as given to `{op}`, or its results.{mask if MASK in given else ""}

    Returns:
        {listed}: {"contiguous" if dense else "with the layouts"}, of the shapes and dtypes of {of};
            None where the argument is, or {MASK} leaves it out.

    Raises:
        TypeError, ValueError: as `{public}`; or a gradient does not have the shape of its result.
    """


def _widened(value: Any) -> Any:
    """A floating-point tensor in the dtype of the arithmetic: float32, unless it is float64."""
    is_narrow = isinstance(value, Tensor) and value.is_floating_point()
    return value.float() if is_narrow and value.dtype is not torch.float64 else value
