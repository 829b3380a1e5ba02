"""The fakes of ops that have a line (`liger_ops/axes.py`), compiled once: a call parses nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import library
from ..axes import Entry, Line, lines, option_for, unnamed
from . import checks
from .arguments import Check, Names, arguments_check, options_check
from .sizes import Sizes


class Exceptions(NamedTuple):
    """What a line cannot say of an op: a check, and the arguments whose shapes it checks."""

    check: Check = lambda call: None
    shapes: Sequence[str] = ()


# The public name of an op -> its exceptions.
EXCEPTIONS: dict[str, Exceptions] = {}


def also(*names: str, shapes: Sequence[str] = ()) -> Callable[[Check], Check]:
    """Register a check of the calls of ops and of their backwards, made after those of the line."""

    def decorate(check: Check) -> Check:
        EXCEPTIONS.update(dict.fromkeys(names, Exceptions(check, shapes)))
        return check

    return decorate


def register() -> None:
    """Register a fake of every op that has a line and no fake of its own."""
    for op in library.OPS.values():
        axes = library.declared(op).axes
        if op.fake is None and isinstance(axes, str) and axes:
            library.fake(op.name)(_fake(op, lines(axes)))


def _fake(op: library.Op, forms: tuple[Line, ...]) -> Callable[[Any], Any]:
    compiled = [_form(op, line, unnamed(line, forms)) for line in forms]
    if len(compiled) == 1:
        return compiled[0][1]

    def fake(call: Any) -> Any:
        return next(one for absent, one in compiled if all(call[i] is None for i in absent))(call)

    return fake


def _form(op: library.Op, line: Line, unnamed: list[str]) -> tuple[list[int], Callable[[Any], Any]]:
    """The arguments that a form lacks, and the fake of its calls."""
    names = Names(op, line, unnamed)
    exceptions = EXCEPTIONS.get(names.op.removesuffix("_backward"), Exceptions())
    sizes = Sizes()
    check_arguments = arguments_check(names, sizes, exceptions.shapes)
    check_options = options_check(names, library.declared(op).options)
    check_others = exceptions.check
    outputs = (gradients if op.name.endswith("_backward") else results)(op, names, sizes)

    def fake(call: Any) -> Any:
        check_arguments(call)
        check_options(call)
        check_others(call)
        return outputs(call)

    return [names.index[name] for name in unnamed if name in names.index], fake


def results(op: library.Op, names: Names, sizes: Sizes) -> Callable[[Any], Any]:
    """The allocation of a forward's results."""
    found, dtypes = [], {}
    for (name, entry), result in zip(names.line.results.items(), op.schema.returns, strict=True):
        asked = names.index.get(option_for(name)) if "Optional" in str(result.type) else None
        dtypes.setdefault(entry.dtype, _dtype(op, names, entry))
        found.append((asked, _allocation(names, sizes, entry), entry.dtype))
    if len(found) == 1:
        ((_, allocate_one, kind),) = found
        dtype_of = dtypes[kind]
        return lambda call: allocate_one(call, dtype_of(call))

    def allocate(call: Any) -> Any:
        given = {kind: dtype(call) for kind, dtype in dtypes.items()}
        return tuple(
            one(call, given[kind]) if asked is None or call[asked] else None
            for asked, one, kind in found
        )

    return allocate


def _allocation(names: Names, sizes: Sizes, entry: Entry) -> Callable[[Any, torch.dtype], Tensor]:
    like = None if entry.reduced is not None else names.like(entry.axes)
    if like is not None:
        return lambda call, dtype: checks.like(call[like], dtype)
    first, shape = names.index[names.first], names.shape(entry, sizes)
    return lambda call, dtype: call[first].new_empty(shape(call), dtype=dtype, requires_grad=False)


def _dtype(op: library.Op, names: Names, entry: Entry) -> Callable[[Any], torch.dtype]:
    if entry.dtype:
        return lambda call: getattr(torch, entry.dtype)
    terms = (op.dtype or names.first).split("+")
    indices = [names.index[name] for name in terms if name in names.tensors]
    if "float32" in terms:
        return lambda call: checks.wide(*(call[i] for i in indices))
    if len(indices) == 1:
        return lambda call: call[indices[0]].dtype
    first, second = indices
    return lambda call: torch.promote_types(call[first].dtype, call[second].dtype)


def gradients(op: library.Op, names: Names, sizes: Sizes) -> Callable[[Any], Any]:
    """The allocation of the gradients that the mask of a backward asks for."""
    of_forward = zip(op.schema.returns, library.tensor_names(library.declared(op)), strict=False)
    wanted = [result.name.removeprefix("d") or name for result, name in of_forward]
    like = [
        names.index[name] if name in names.index else names.like(names.line.arguments[name].axes)
        for name in wanted
    ]
    if "output_mask" not in names.index:
        return lambda call: checks.like(call[like[0]])
    mask = names.index["output_mask"]
    return lambda call: tuple(
        checks.like(call[i]) if wanted and call[i] is not None else None
        for wanted, i in zip(call[mask], like, strict=True)
    )
