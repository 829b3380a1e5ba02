"""The fakes of ops that have a line (`liger_ops/axes.py`), compiled once: a call parses nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from .. import library
from ..axes import COMPUTED_BY_FORWARD, Line, TensorSpec, asked_by, lines, unnamed
from . import checks
from .arguments import Check, Names, arguments_check, options_check
from .sizes import Shape, Sizes

Function = TypeVar("Function", bound=Callable[[Any], Any])
Allocation = Callable[[Any, torch.dtype | None], Tensor]


class Exceptions(NamedTuple):
    """What a line cannot say of an op: checks before those of the line, of which arguments are
    given, and checks after them; the arguments whose shapes these check; the sizes of axes that no
    tensor has; the function that allocates the gradients that a forward computes; and the one that
    allocates what has the shape of an argument."""

    before: Sequence[Check] = ()
    after: Sequence[Check] = ()
    shapes: Sequence[str] = ()
    sizes: Mapping[str, Shape] = {}
    gradients: Callable[[Any], tuple[Tensor | None, ...]] | None = None
    like: Callable[[Tensor, torch.dtype | None], Tensor] = checks.like


# The public name of an op -> its exceptions.
EXCEPTIONS: dict[str, Exceptions] = {}


def also(*names: str, first: bool = False, shapes: Sequence[str] = ()) -> Callable[[Check], Check]:
    """Register a check of the calls of ops and of their backwards, after or before their lines'."""

    def decorate(check: Check) -> Check:
        for name in names:
            known = EXCEPTIONS.get(name, Exceptions())
            before, after = ((check,), ()) if first else ((), (check,))
            EXCEPTIONS[name] = known._replace(
                before=(*known.before, *before), after=(*known.after, *after),
                shapes=(*known.shapes, *shapes),
            )  # fmt: skip
        return check

    return decorate


def gives(exception: str, *names: str) -> Callable[[Function], Function]:
    """Register a function of ops: `like` or `gradients` of `Exceptions`, or the size of an axis."""

    def decorate(function: Function) -> Function:
        for name in names:
            known = EXCEPTIONS.get(name, Exceptions())
            given: dict[str, Any] = {exception: function}
            if exception not in Exceptions._fields:
                given = {"sizes": {**known.sizes, **given}}
            EXCEPTIONS[name] = known._replace(**given)
        return function

    return decorate


def register() -> None:
    """Register a fake of every op that has a line."""
    for op in library.OPS.values():
        if axes := library.declared(op).axes:
            library.fake(op.name)(_fake(op, lines(axes)))


def _fake(op: library.Op, forms: tuple[Line, ...]) -> Callable[[Any], Any]:
    base = op.name.removesuffix("_backward").removesuffix("_forward")
    exceptions = EXCEPTIONS.get(base, Exceptions())
    compiled = [_form(op, line, unnamed(line, forms), exceptions) for line in forms]
    check_options = options_check(op)

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
    """The arguments that a form lacks, its checks, and the allocation of its outputs."""
    names = Names(op, line, unnamed)
    given = {axis for name in names.tensors for axis in names.axes_of_argument(name)}
    sizes = Sizes({axis: size for axis, size in exceptions.sizes.items() if axis not in given})
    check = arguments_check(names, sizes, exceptions.shapes)
    if op.name.endswith("_backward"):
        outputs = gradients(op, names, sizes, exceptions.like)
    else:
        outputs = results(op, names, sizes, exceptions)
    return [names.index[name] for name in unnamed if name in names.index], check, outputs


def results(
    op: library.Op, names: Names, sizes: Sizes, exceptions: Exceptions
) -> Callable[[Any], Any]:
    """The allocation of a forward's results."""
    computed = exceptions.gradients
    found: list[tuple[int | None, Allocation, str]] = []
    dtypes: dict[str, Callable[[Any], torch.dtype]] = {}
    for (name, entry), result in zip(names.line.results.items(), op.schema.returns, strict=True):
        if computed is None or name not in COMPUTED_BY_FORWARD:
            asked = names.index.get(asked_by(name)) if "Optional" in str(result.type) else None
            dtypes.setdefault(entry.dtype, _dtype(op, names, entry))
            found.append((asked, _allocation(names, sizes, entry, exceptions.like), entry.dtype))
    first = 0 if computed is None else list(names.line.results).index(COMPUTED_BY_FORWARD[0])

    def allocate(call: Any) -> Any:
        given = {kind: dtype(call) for kind, dtype in dtypes.items()}
        outputs = [
            None if asked is not None and _is_off(call[asked]) else one(call, given[kind])
            for asked, one, kind in found
        ]
        if computed is not None:
            outputs[first:first] = computed(call)
        return tuple(outputs) if len(outputs) > 1 else outputs[0]

    return allocate


def _is_off(option: Any) -> bool:
    return option is None or option is False


def _allocation(names: Names, sizes: Sizes, entry: TensorSpec, allocate: Allocation) -> Allocation:
    like = None if entry.reduced is not None else names.like(entry.axes)
    if like in names.needed:
        index = names.index[like]
        return lambda call, dtype: allocate(call[index], dtype)
    first, shape = names.index[names.first], names.shape(entry, sizes)
    return lambda call, dtype: call[first].new_empty(shape(call), dtype=dtype, requires_grad=False)


def _dtype(op: library.Op, names: Names, entry: TensorSpec) -> Callable[[Any], torch.dtype]:
    if entry.dtype in names.tensors:
        index = names.index[entry.dtype]
        return lambda call: call[index].dtype
    fixed = getattr(torch, entry.dtype, None)
    if isinstance(fixed, torch.dtype):
        return lambda call: fixed
    terms = (entry.dtype or op.dtype or names.first).split("+")
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
    """The allocation of the gradients that the mask of a backward asks for."""
    of_forward = zip(op.schema.returns, library.tensor_names(library.declared(op)), strict=False)
    found = [result.name.removeprefix("d") or name for result, name in of_forward]
    like = [_like(names, name) for name in found]
    if "output_mask" in names.index:
        mask = names.index["output_mask"]
        return lambda call: tuple(
            allocate(call[i], None) if wanted and call[i] is not None else None
            for wanted, i in zip(call[mask], like, strict=True)
        )
    if like[0] is None:
        shape = sizes.shape(names.line.arguments[found[0]].axes)
        return lambda call: call[0].new_empty(shape(call), requires_grad=False)
    return lambda call: allocate(call[like[0]], None)


def _like(names: Names, name: str) -> int | None:
    """The index of the argument of this name or, without one, of the first tensor with the axes of
    the forward's argument, or of its gradient."""
    if name in names.index:
        return names.index[name]
    entry = names.line.arguments.get(name) or names.line.results[f"d{name}"]
    like = names.like(entry.axes)
    return None if like is None else names.index[like]
