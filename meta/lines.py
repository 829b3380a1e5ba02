"""Compile the fakes of ops from their axes lines (`liger_ops/axes.py`). No call parses a line."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from .. import library
from ..axes import COMPUTED_BY_FORWARD, Line, TensorSpec, asked_by, lines, unnamed
from . import checks
from .arguments import Check, Names, Shape, Sizes, arguments_check, options_check

Function = TypeVar("Function", bound=Callable[[Any], Any])
Allocation = Callable[[Any, torch.dtype | None], Tensor]


class Exceptions(NamedTuple):
    """Additions to an op's line, for checks, sizes and allocations that a line cannot express."""

    # Checks before those of the line, such as of which tensors are given, and checks after them.
    before: Sequence[Check] = ()
    after: Sequence[Check] = ()
    # The arguments whose shapes these checks cover; the line's checks then do not.
    shapes: Sequence[str] = ()
    # Axis of a result -> its size, if no argument has the axis.
    sizes: Mapping[str, Shape] = {}
    # Allocates the gradients that a forward computes.
    gradients: Callable[[Any], tuple[Tensor | None, ...]] | None = None
    # Allocates an output in the shape of an argument, in another layout than a contiguous one.
    like: Callable[[Tensor, torch.dtype | None], Tensor] = checks.like


# Public name of an op -> its exceptions.
EXCEPTIONS: dict[str, Exceptions] = {}


def also(*names: str, first: bool = False, shapes: Sequence[str] = ()) -> Callable[[Check], Check]:
    """Register a check of the calls of these ops and of their backward ops. It runs after the
    checks of the line, or before them if `first`. `shapes` are the arguments whose shapes it checks
    in place of the line."""

    def decorate(check: Check) -> Check:
        for name in names:
            exceptions = EXCEPTIONS.get(name, Exceptions())
            before, after = ((check,), ()) if first else ((), (check,))
            EXCEPTIONS[name] = exceptions._replace(
                before=(*exceptions.before, *before), after=(*exceptions.after, *after),
                shapes=(*exceptions.shapes, *shapes),
            )  # fmt: skip
        return check

    return decorate


def gives(exception: str, *names: str) -> Callable[[Function], Function]:
    """Register a function for ops. `exception` is "like" or "gradients", as in `Exceptions`, or an
    axis, whose size the function returns as a tuple of one number."""

    def decorate(function: Function) -> Function:
        for name in names:
            exceptions = EXCEPTIONS.get(name, Exceptions())
            changed: dict[str, Any] = {exception: function}
            if exception not in Exceptions._fields:
                changed = {"sizes": {**exceptions.sizes, **changed}}
            EXCEPTIONS[name] = exceptions._replace(**changed)
        return function

    return decorate


def register() -> None:
    """Register a fake of every op that has a line."""
    for op in library.OPS.values():
        if axes := library.declared(op).axes:
            library.fake(op, _fake(op, lines(axes)))


def _fake(op: library.Op, forms: tuple[Line, ...]) -> Callable[[Any], Any]:
    base = op.name.removesuffix("_backward").removesuffix("_forward")
    exceptions = EXCEPTIONS.get(base, Exceptions())
    compiled = [_form(op, line, unnamed(line, forms), exceptions) for line in forms]
    check_options = options_check(op, op.name.removesuffix("_forward"))

    def fake(call: Any) -> Any:
        for check in exceptions.before:
            check(call)
        for absent, check_arguments, outputs in compiled:
            if not absent or all(call[i] is None for i in absent):
                check_arguments(call)
                check_options(call)
                for check in exceptions.after:
                    check(call)
                return outputs(call)
        raise AssertionError(f"{op.name}: no form of the line names the tensors that are given")

    return fake


def _form(
    op: library.Op, line: Line, unnamed: Sequence[str], exceptions: Exceptions
) -> tuple[list[int], Check, Callable[[Any], Any]]:
    """Compile a form of a line: the indices of the arguments that must be None in a call of this
    form, the check of the arguments, and the allocation of the outputs."""
    names = Names(op, line, unnamed)
    read = {axis for name in names.tensors for axis in names.axes_of_argument(name)}
    sizes = Sizes({axis: size for axis, size in exceptions.sizes.items() if axis not in read})
    check = arguments_check(names, sizes, exceptions.shapes)
    if op.name.endswith("_backward"):
        outputs = gradients(op, names, sizes, exceptions.like)
    else:
        outputs = results(op, names, sizes, exceptions)
    return [names.index[name] for name in unnamed if name in names.index], check, outputs


def results(
    op: library.Op, names: Names, sizes: Sizes, exceptions: Exceptions
) -> Callable[[Any], Any]:
    """Compile the allocation of a forward's results."""
    gradients = exceptions.gradients
    compiled: list[tuple[int | None, Allocation, str]] = []
    dtypes: dict[str, Callable[[Any], torch.dtype]] = {}
    for (name, spec), result in zip(names.line.results.items(), op.schema.returns, strict=True):
        if gradients is None or name not in COMPUTED_BY_FORWARD:
            option = names.index.get(asked_by(name)) if "Optional" in str(result.type) else None
            dtypes.setdefault(spec.dtype, _dtype(op, names, spec))
            compiled.append((option, _allocation(names, sizes, spec, exceptions.like), spec.dtype))
    # The gradients stand together among the results, from here on.
    first = 0 if gradients is None else list(names.line.results).index(COMPUTED_BY_FORWARD[0])

    def allocate(call: Any) -> Any:
        dtype_of = {text: dtype(call) for text, dtype in dtypes.items()}
        outputs = [
            None if option is not None and _is_off(call[option]) else new(call, dtype_of[text])
            for option, new, text in compiled
        ]
        if gradients is not None:
            outputs[first:first] = gradients(call)
        return tuple(outputs) if len(outputs) > 1 else outputs[0]

    return allocate


def _is_off(option: Any) -> bool:
    return option is None or option is False


def _allocation(names: Names, sizes: Sizes, spec: TensorSpec, allocate: Allocation) -> Allocation:
    """Compile the allocation of a result: like an argument of the same axes that is never None, or
    else contiguous, of the shape that the line gives."""
    like = None if spec.reduced is not None else names.like(spec.axes)
    if like in names.required:
        index = names.index[like]
        return lambda call, dtype: allocate(call[index], dtype)
    first, shape = names.index[names.first], names.shape(spec, sizes)
    return lambda call, dtype: call[first].new_empty(shape(call), dtype=dtype, requires_grad=False)


def _dtype(op: library.Op, names: Names, spec: TensorSpec) -> Callable[[Any], torch.dtype]:
    """Compile the function that computes a result's dtype from a call."""
    if spec.dtype in names.tensors:
        index = names.index[spec.dtype]
        return lambda call: call[index].dtype
    fixed = getattr(torch, spec.dtype, None)
    if isinstance(fixed, torch.dtype):
        return lambda call: fixed
    terms = (spec.dtype or op.dtype or names.first).split("+")
    indices = [names.index[name] for name in terms if name in names.tensors]
    if "float32" in terms:
        return lambda call: checks.wide(*(call[i] for i in indices))
    if len(indices) == 1:
        return lambda call: call[indices[0]].dtype
    first, second = indices
    return lambda call: torch.promote_types(call[first].dtype, call[second].dtype)


def gradients(
    op: library.Op, names: Names, sizes: Sizes, allocate: Allocation
) -> Callable[[Any], Any]:
    """Compile the allocation of the gradients that `output_mask` of a backward op asks for."""
    # Results without names are the gradients of the forward's first tensors.
    pairs = zip(op.schema.returns, library.tensor_names(library.declared(op)), strict=False)
    arguments = [result.name.removeprefix("d") or name for result, name in pairs]
    like = [_like(names, name) for name in arguments]
    if "output_mask" in names.index:
        mask = names.index["output_mask"]
        return lambda call: tuple(
            allocate(call[i], None) if wanted and call[i] is not None else None
            for wanted, i in zip(call[mask], like, strict=True)
        )
    if like[0] is None:
        shape = sizes.shape(names.line.arguments[arguments[0]].axes)
        return lambda call: call[0].new_empty(shape(call), requires_grad=False)
    return lambda call: allocate(call[like[0]], None)


def _like(names: Names, name: str) -> int | None:
    """Return the index of the argument of this name. If the backward op does not take it, return
    the index of the first tensor with the same axes, or None if there is none."""
    if name in names.index:
        return names.index[name]
    spec = names.line.arguments.get(name) or names.line.results[f"d{name}"]
    like = names.like(spec.axes)
    return None if like is None else names.index[like]
