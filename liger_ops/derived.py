"""Derive what an op registers from its definition: the schema and the named tuple of its arguments,
and the definitions of `<op>_forward` and `<op>_backward`.

The signatures of these come from a string form and the signature of `<op>`. The computation of a
backward op is by autograd. A form lists arguments, and for a backward op "->" and results: "dy x
weight eps -> dx dweight".
"""

from __future__ import annotations

import functools
import inspect
from collections import namedtuple
from collections.abc import Callable, Mapping
from functools import cache, partial
from inspect import Parameter
from typing import Any, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from .autograd import vector_jacobian

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


Function = Callable[..., Any]
# A function of a gradient and its argument that returns the gradient in the strides of the result.
Layout = Callable[[Tensor, Tensor], Tensor]
# The argument that says which gradients to compute: of a backward op, and of a forward op that
# computes gradients.
MASK, FORWARD_MASK = "output_mask", "gradient_mask"


def contiguous(gradient: Tensor, argument: Tensor) -> Tensor:
    return gradient.contiguous()


def forward_definition(function: Function, public: Function, form: str) -> Function:
    """Make the definition of `<op>_forward` from a function of its call; `public` is the function
    `<op>`.

    `form` lists the arguments. "..." stands for the arguments of `public` that the form does not
    name, and "-name" leaves one out. Names that `public` does not have are new arguments:
    `return_<result>` asks for a result, `gradient_mask` for the gradients of a head's five tensors,
    and any other is an optional tensor.
    """
    public_parameters = _parameters(public)

    def added(name: str) -> Parameter:
        if name.startswith("return_"):
            return _parameter(name, bool, False)
        if name == FORWARD_MASK:
            return _parameter(name, MASKS[2], (False,) * 5)
        return _parameter(name, Tensor | None, None)

    parameters = _expand(form, public_parameters, list(public_parameters), added)
    inherited = ", ".join(name for name in parameters if name in public_parameters)
    text, returns, rest = inspect.cleandoc(function.__doc__ or "").partition("\n\nReturns:")
    text += "" if "\nArgs:" in text else "\n\nArgs:"
    text = text.replace("\nArgs:", f"\nArgs:\n    {inherited}: as for `{public.__name__}`.", 1)
    function.__doc__ = text + returns + rest
    return definition_of_call(function, parameters, get_type_hints(function)["return"])


def backward_definition(op: str, function: Function, form: str, forward: Function) -> Function:
    """Make the definition of `<op>_backward` from a function of its call; `forward` is the
    definition of the op.

    `form` is "arguments -> results". The arguments are the gradients of the op's results; arguments
    and results of the op by their names, where "..." stands for the op's options (its arguments
    that are not tensors) that the form does not name; and `output_mask`, which says for each
    gradient whether it is computed. The results are named "d<argument>". "name?" is a tensor that
    may be None, and "name=" one that is None by default.
    """
    parameters, count, results = _parse_backward(form, forward)
    result = tuple[(Tensor | None,) * len(results)] if MASK in parameters else Tensor  # type: ignore[misc]
    function.__name__ = function.__qualname__ = f"{op.removesuffix('_forward')}_backward"
    function.__doc__ = inspect.cleandoc(function.__doc__ or "") + _sections(
        op, list(parameters), count, results
    )
    return definition_of_call(function, parameters, result)


def gradient_by_autograd(function: Function, form: str, layout: Layout = contiguous) -> Function:
    """Make the function of a backward op's call that computes the gradients of `function` by
    autograd, in float32, and rounds them once. Its keyword arguments are passed to `function`."""
    backward_parameters, count, results = _parse_backward(form, function)
    parameters = _parameters(function)
    names = list(parameters)
    # The backward op has no argument for what the gradients do not depend on.
    defaults = {name: parameters[name].default for name in names if name not in backward_parameters}
    positions = [names.index(result.removeprefix("d")) for result in results]

    def gradient(call: Any, **options: Any) -> Any:
        values = dict(zip(backward_parameters, call, strict=True), **defaults)
        arguments = [values[name] for name in names]
        mask = values.get(MASK, [True])
        wanted = [
            i
            for i, needed in zip(positions, mask, strict=True)
            if needed and arguments[i] is not None
        ]
        wide = [_widened(argument) for argument in arguments]
        computed = vector_jacobian(partial(function, **options), wide, wanted, call[:count])
        gradients = dict.fromkeys(positions)
        for i, gradient in zip(wanted, computed, strict=True):
            argument = arguments[i]
            if gradient is None:
                gradient = torch.zeros_like(argument)
            # A copy, as no result of an op may alias an argument or another result: autograd may
            # return an incoming gradient, or one tensor for two arguments.
            gradients[i] = layout(gradient.to(argument.dtype, copy=True), argument)
        return tuple(gradients.values()) if MASK in backward_parameters else gradients[positions[0]]

    gradient.__module__ = function.__module__
    gradient.__doc__ = "Differentiate the op's definition by autograd, in float32, rounded once."
    return gradient


def _parse_backward(form: str, function: Function) -> tuple[dict[str, Parameter], int, list[str]]:
    """Return the parameters of a backward op, the number of incoming gradients among them, and the
    names of the op's results. `function` is the definition of the forward op."""
    listed, results = form.split(" -> ")
    # Without defaults: a backward op is called with every argument.
    forward = {name: _parameter(name, p.annotation) for name, p in _parameters(function).items()}
    tensors_and_masks = (Tensor, Tensor | None, MASKS[2])
    options = [
        name
        for name, p in forward.items()
        if p.annotation not in tensors_and_masks and not name.startswith("return_")
    ]

    def added(token: str) -> Parameter:
        name = token.rstrip("?=")
        if name == MASK:
            return _parameter(name, list[bool])
        hint = Tensor if name == token else Tensor | None
        return _parameter(name, hint, None if "=" in token else Parameter.empty)

    parameters = _expand(listed, forward, options, added)
    # An argument of the forward op may start with "d" itself, such as `down` or `dilation`.
    count = next(i for i, n in enumerate(parameters) if n in forward or not n.startswith("d"))
    return parameters, count, results.split()


@cache
def _parameters(function: Function) -> dict[str, Parameter]:
    """Return the parameters of a definition, with evaluated annotations."""
    hide_keyword_only(function)
    hints = get_type_hints(function)
    parameters = inspect.signature(function).parameters
    return {name: p.replace(annotation=hints[name]) for name, p in parameters.items()}


def _parameter(name: str, hint: Any, default: Any = Parameter.empty) -> Parameter:
    kind = Parameter.POSITIONAL_OR_KEYWORD
    return Parameter(name, kind, annotation=hint, default=default)


def _expand(
    form: str, base: dict[str, Parameter], rest: list[str], added: Callable[[str], Parameter]
) -> dict[str, Parameter]:
    """Return the parameters that a form lists. A token of the form is the name of a parameter in
    `base`, "..." for those of `rest` that the form does not name, "-name" to leave one out, or is
    passed to `added`, which makes a new parameter."""
    tokens = form.split()
    named = {token.strip("-?=") for token in tokens}
    parameters: list[Parameter] = []
    for token in tokens:
        if token == "...":
            parameters += [base[name] for name in rest if name not in named]
        elif not token.startswith("-"):
            parameters.append(base[token] if token in base else added(token))
    return {parameter.name: parameter for parameter in parameters}


def _sections(op: str, args: list[str], count: int, results: list[str]) -> str:
    """Write the sections of a backward op's documentation."""
    names = [name for name in args if name != MASK]
    listed, public = ", ".join(results), op.removesuffix("_forward")
    of = ", ".join(result.removeprefix("d") for result in results)
    mask = f"\n    {MASK}: whether each of {listed} is computed and allocated."
    return f"""

Args:
    {", ".join(names[:count])}: the gradients of the results, of their shapes, any strides.
    {", ".join(names[count:])}: as given to `{op}`, or its results.{mask if MASK in args else ""}

Returns:
    {listed}: dense, of the shapes and dtypes of {of}; None where the argument is None, or {MASK}
        leaves it out.

Raises:
    TypeError, ValueError: as `{public}`; or a gradient does not have the shape of its result.
"""


def _widened(value: Any) -> Any:
    """Return a floating-point tensor in the dtype of the arithmetic: float32, or float64 if it is
    float64. Other values are returned unchanged."""
    is_narrow = isinstance(value, Tensor) and value.is_floating_point()
    return value.float() if is_narrow and value.dtype is not torch.float64 else value
